"""The search over batch sizes with made-up runs and memories of known shapes: its choices, refusals and results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_amp.compare import Progress, Run, Spec
from lightning_amp.tune import BatchSizeResult, BatchSizes, Measurement
from lightning_amp.tune._batch_size_run import Facts
from lightning_amp.tune._batch_sizes import MOST_RUNS, largest_within, next_size, suggested_rate
from lightning_amp.tune._find_batch_size import LimitTooLowError, RunFailedError, Search

FACTS = Facts(own_size=32, num_batches=9, device="cpu", rates=(("SGD", 0.1),))
GIB = 2**30


class MadeUp:
    """Replaces `run_once`: the peak memory is a function of the size."""

    def __init__(self, memory: Callable[[int], float], facts: Facts = FACTS) -> None:
        self.memory, self.facts = memory, facts
        self.sizes: list[int | None] = []

    def __call__(self, arm: Spec, size: int | None) -> tuple[Run, Facts]:
        self.sizes.append(size)
        rows = size or self.facts.own_size
        return self.outcome(rows), self.noted(rows)

    def outcome(self, rows: int) -> Run:
        peak = self.memory(min(rows, self.facts.num_rows or rows))
        if math.isinf(peak):
            return Run("fp32", 0, error="OutOfMemoryError: CUDA out of memory.")
        return Run("fp32", 0, peak_memory_bytes=int(peak * GIB), step_s=(0.5,), samples_per_s=(2.0 * rows,))

    def noted(self, rows: int) -> Facts:
        return replace(self.facts, rows=rows)


def linear(rows: int) -> float:
    return 0.2 + 0.001 * rows


ARM = Spec("fp32", {"precision": "fp32"})


def search(runs: Any, limit: float | None = 1.0) -> BatchSizeResult:
    return Search(runs, ARM, limit, Progress(3)).result()


def test_two_sizes_and_the_one_that_they_lead_to(capsys: pytest.CaptureFixture[str]) -> None:
    runs = MadeUp(linear, replace(FACTS, own_size=100))
    result = search(runs)
    assert runs.sizes == [None, 200, 800]
    assert (result.batch_size, result.samples_per_s, result.error) == (800, 1600.0, None)
    assert result.peak_gib == pytest.approx(1.0)
    assert [p.batch_size for p in result.measured] == [100, 200, 800]
    assert [p.samples_per_s for p in result.measured] == [200.0, 400.0, 1600.0]
    assert result.lr == 0.8
    assert result.message == (
        "A batch of 800 holds 1 GiB of 1 GiB (size of all tensors): memory is the limit. Learning rate to try: 0.8"
        " (scaled from 0.1 at batch size 100, linear rule for SGD); a starting point only."
    )
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] fp32, batch size 100: 307 MiB, 0 s",
        "[2/3] fp32, batch size 200: 410 MiB, 0 s",
        "[3/3] fp32, batch size 800: 1 GiB, 0 s",
    ]


def test_the_rows_are_the_limit() -> None:
    result = search(MadeUp(linear, replace(FACTS, num_rows=50)))
    assert result.batch_size == 50
    assert result.message.startswith("A batch of all 50 rows holds 256 MiB of 1 GiB (size of all tensors): the data is")


@pytest.mark.parametrize("rows", [0, None, 1000])
def test_no_batches_at_all(rows: int | None) -> None:
    runs = MadeUp(linear, replace(FACTS, num_batches=0, num_rows=rows))
    with pytest.raises(ValueError, match="must have batches; `train_dataloader` gives none"):
        search(runs)


def test_a_stream_that_ends() -> None:
    class Stream(MadeUp):
        def noted(self, rows: int) -> Facts:
            return replace(self.facts, rows=min(rows, 300))

    result = search(Stream(lambda rows: 0.2 + 0.001 * min(rows, 300)))
    assert result.batch_size == 300
    assert "all 300 rows" in result.message


def test_batches_that_do_not_follow() -> None:
    runs = MadeUp(lambda rows: 0.3)
    runs.noted = lambda rows: replace(runs.facts, rows=16)  # type: ignore[method-assign]
    message = r"must change with `batch_size`: it was 32, then 64, and a batch had 16 rows each time. Write `DataLoader"
    with pytest.raises(ValueError, match=message):
        search(runs)
    assert len(runs.sizes) == 2


def test_nothing_fits() -> None:
    runs = MadeUp(lambda rows: 2.0 + rows)
    message = r"^`memory_limit_gib` must hold the smallest batch; in fp32 a batch of 1 holds 3 GiB, and the limit is 1"
    with pytest.raises(LimitTooLowError, match=message):
        search(runs)
    assert runs.sizes[-1] == 1


def test_a_single_row_that_a_module_does_not_take() -> None:
    class Norm(MadeUp):
        def outcome(self, rows: int) -> Run:
            one = Run("fp32", 0, error="ValueError: Expected more than 1 value per channel when training")
            return one if rows == 1 else super().outcome(rows)

    with pytest.raises(LimitTooLowError, match=r"a batch of \d+ holds 2 GiB.*A batch of 1 failed: ValueError"):
        search(Norm(lambda rows: 2.0))


def test_memory_that_runs_out_on_a_device() -> None:
    """The size of a run that ran out of memory does not fit."""
    runs = MadeUp(lambda rows: linear(rows) if rows <= 500 else math.inf, replace(FACTS, device="cuda", device_gib=1.0))
    result = search(runs, limit=None)
    assert 480 <= result.batch_size <= 500
    assert "memory is the limit. Memory ran out at 5" in result.message
    assert "tensors" not in result.message


def test_the_limit_is_the_smaller_one() -> None:
    assert "of 819 MiB" in search(MadeUp(linear, replace(FACTS, device="cuda", device_gib=0.8))).message


def test_a_process_that_grows_more_than_its_tensors() -> None:
    class Process(MadeUp):
        def noted(self, rows: int) -> Facts:
            return replace(super().noted(rows), process_gib=0.125 + 0.002 * rows)

    assert search(Process(linear)).batch_size == 496


def test_a_device_that_does_not_say_what_it_has() -> None:
    with pytest.raises(ValueError, match="`memory_limit_gib` must be given on mps, which does not say how much memory"):
        search(MadeUp(linear, replace(FACTS, device="mps")), limit=None)


def test_what_the_process_refused() -> None:
    with pytest.raises(ValueError, match=r"^there is none$"):
        search(MadeUp(linear, replace(FACTS, refused="there is none")))


def test_an_error_of_the_module() -> None:
    class Broken(MadeUp):
        def outcome(self, rows: int) -> Run:
            log = 'Traceback\n  File "/home/me/net.py", line 12, in training_step\n    x\nKeyError: 1'
            return Run("fp32", 0, error="KeyError: 1", log=log)

    message = r"^Training in fp32 failed at batch size 32: KeyError: 1 \(/home/me/net.py, line 12, in training_step\).$"
    with pytest.raises(RunFailedError, match=message):
        search(Broken(linear))


def test_what_an_optimizer_step_sees() -> None:
    assert "An optimizer step sees 8 such batches." in search(MadeUp(linear, replace(FACTS, per_step=8))).message


# -- memories of known shapes ------------------------------------------------------------------------------------------


def search_in(
    memory: Callable[[int], float], limit: float, first: int = 32, most: float = math.inf
) -> tuple[int, list[int]]:
    """Return the size that a search finds, and all sizes that it ran."""
    points = [Measurement(first, memory(first), 1.0)]
    while len(points) < 20 and (size := next_size(points, limit, most)) is not None:
        assert size not in {p.batch_size for p in points}
        assert size >= 1
        assert size <= most
        points.append(Measurement(size, memory(size), 1.0))
    best = largest_within(points, limit)
    return (0 if best is None else best.batch_size), [p.batch_size for p in points]


@pytest.mark.parametrize("first", [1, 8, 32, 500, 5000])
@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.9])
def test_a_straight_line(fixed: float, first: int) -> None:
    """Three runs, or some more from a size so small that most of the memory does not depend on it."""

    def memory(b: int) -> float:
        return fixed + 0.001 * b

    found, run = search_in(memory, 1.0, first)
    assert memory(found) <= 1.0
    assert memory(found + 8) > 1.0
    assert len(run) <= 6


FLAT_AT_FIRST = [partial(lambda kink, b: max(kink, 0.05 + 0.0005 * b), kink) for kink in (0.1, 0.3, 0.6)]
"""The optimizer's step needs more memory than small batches."""


@pytest.mark.parametrize(
    ("memory", "first", "factor"),
    [
        *((memory, first, 1.04) for memory in FLAT_AT_FIRST for first in (8, 32, 3000)),
        *((lambda b: 0.1 + 0.001 * b + 1e-6 * b * b, first, 1.05) for first in (2, 64, 900)),
    ],
)
def test_memory_that_bends_upwards(memory: Callable[[int], float], first: int, factor: float) -> None:
    found, run = search_in(memory, 1.0, first)
    assert memory(found) <= 1.0
    assert memory(math.ceil(found * factor) + 8) > 1.0
    assert len(run) <= MOST_RUNS
    assert max(map(memory, run)) <= max(2.2, memory(first))


@pytest.mark.parametrize("first", [8, 100, 4000])
def test_memory_that_runs_out(first: int) -> None:
    """A device that has less memory than it reports."""

    def memory(b: int) -> float:
        peak = 0.1 + 0.001 * b
        return peak if peak <= 0.8 else math.inf

    found, run = search_in(memory, 1.0, first)
    assert 600 <= found <= 700
    assert len(run) <= MOST_RUNS


@pytest.mark.parametrize(("most", "first"), [(50, 32), (50, 8), (50, 50), (100, 8), (71, 32)])
def test_the_rows_end_before_the_memory_does(most: int, first: int) -> None:
    found, run = search_in(lambda b: 0.1 + 0.001 * b, 1.0, first, most)
    assert found == most
    assert len(run) <= 4


def test_sizes_are_multiples_of_eight_from_64_on() -> None:
    assert search_in(lambda b: 0.001 * b, 0.0715)[0] == 64
    assert search_in(lambda b: 0.001 * b, 0.0635)[0] == 63
    assert search_in(lambda b: 0.001 * b, 1.0, most=71)[0] == 71


# -- the learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "expected", "rule"),
    [
        ("SGD", 0.4, "linear rule for SGD"),
        ("AdamW8bit", 0.2, "square root rule for AdamW8bit"),
        ("LAMB", 0.2, "square root"),
        ("LARS", 0.4, "linear"),
    ],
)
def test_rules(optimizer: str, expected: float, rule: str) -> None:
    lr, text = suggested_rate([(optimizer, 0.1)] * 2, 32, 128)
    assert lr == pytest.approx(expected)
    assert f"Learning rate to try: {expected:g} (scaled from 0.1 at batch size 32, {rule}" in text


def test_the_same_size_has_the_same_rate() -> None:
    assert suggested_rate([("Adam", 0.123456)], 32, 32)[0] == 0.123456


@pytest.mark.parametrize(
    ("used", "text"),
    [
        ([], "the module has no different learning rates"),
        ([("LBFGS", 1.0)], "not for LBFGS"),
        ([("Adam", 0.0001), ("Adam", 0.0004)], "the module has 2 different learning rates"),
    ],
)
def test_there_is_no_single_one(used: list[tuple[str, float]], text: str) -> None:
    lr, message = suggested_rate(used, 32, 128)
    assert lr is None
    assert text in message


# -- results -----------------------------------------------------------------------------------------------------------

POINTS = (Measurement(32, 0.5, 10.0), Measurement(1024, math.inf, math.nan))
FAILED = BatchSizeResult(0, math.nan, math.nan, None, "KeyError: a | b", (), "KeyError: a | b")
FOUND = BatchSizes({"fp32": BatchSizeResult(1000, 3.96, 12_345.6, 0.0057, "It fits.", POINTS), "a | b": FAILED})


def test_markdown() -> None:
    assert str(FOUND) == (
        "| precision | batch size | peak memory | samples/s | learning rate to try |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| fp32 | 1,000 | 3.96 GiB | 12,300 | 0.0057 |\n"
        "| a \\| b | none |  |  |  |\n"
        "\n"
        "**fp32**: It fits.\n"
        "\n"
        "**a | b**: KeyError: a | b\n"
    )


def test_json_has_no_nan(tmp_path: Path) -> None:
    FOUND.to_json(tmp_path / "found.json")
    data = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert data["fp32"]["batch_size"] == 1000
    assert data["fp32"]["measured"] == [
        {"batch_size": 32, "peak_gib": 0.5, "samples_per_s": 10.0},
        {"batch_size": 1024, "peak_gib": None, "samples_per_s": None},
    ]
    assert (data["a | b"]["error"], data["a | b"]["peak_gib"]) == ("KeyError: a | b", None)
