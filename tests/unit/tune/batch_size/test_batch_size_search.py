"""The search over batch sizes, its refusals and its messages, with made-up runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.compare import Progress, Run, Spec
from lightning_amp.tune.batch_size._batch_size_search import BatchSizeSearch, LimitTooLowError, RunFailedError
from lightning_amp.tune.batch_size._learning_rate import UsedRate
from lightning_amp.tune.batch_size._probe import Facts
from lightning_amp.tune.batch_size._result import BatchSizeResult

FACTS = Facts(own_size=32, num_batches=9, device="cpu", rates=(UsedRate("SGD", 0.1),))
GIB = 2**30


class MadeUp:
    """Replaces `ShortRuns`: the peak memory is a function of the size."""

    def __init__(self, memory: Callable[[int], float], facts: Facts = FACTS) -> None:
        self.memory, self.facts = memory, facts
        self.sizes: list[int | None] = []

    def run(self, arm: Spec, size: int | None) -> tuple[Run, Facts]:
        self.sizes.append(size)
        rows = size or self.facts.own_size
        return self.outcome(rows), self.noted(rows)

    def outcome(self, rows: int) -> Run:
        peak = self.memory(min(rows, self.facts.num_rows or rows))
        if math.isinf(peak):
            return Run("fp32", 0, error="OutOfMemoryError: CUDA out of memory.")
        return Run("fp32", 0, peak_memory_bytes=int(peak * GIB), step_s=(0.5,), samples_per_s=(2.0 * rows,))

    def noted(self, rows: int) -> Facts:
        return replace(
            self.facts, own_size=rows, loader_sizes=(rows,), batch_rows=min(rows, self.facts.num_rows or rows)
        )


def linear(rows: int) -> float:
    return 0.2 + 0.001 * rows


ARM = Spec("fp32", {"precision": "fp32"})


def search(runs: Any, limit: float | None = 1.0) -> BatchSizeResult:
    result, error = BatchSizeSearch(runs, limit, Progress(3, None)).run(ARM)
    assert error is None
    return result


def fails(runs: Any, kind: type[Exception], message: str) -> None:
    """Assert that the search ends with this error, and with a result that repeats it."""
    result, error = BatchSizeSearch(runs, 1.0, Progress(3, None)).run(ARM)
    assert type(error) is kind
    assert re.search(message, str(error))
    assert (result.batch_size, result.error, result.message, result.lr) == (0, str(error), result.error, None)


def test_two_sizes_and_the_one_that_they_lead_to(capsys: pytest.CaptureFixture[str]) -> None:
    runs = MadeUp(linear, replace(FACTS, own_size=100))
    result = search(runs)
    assert runs.sizes == [None, 328, 800]
    assert (result.batch_size, result.samples_per_s, result.error) == (800, 1600.0, None)
    assert result.peak_gib == pytest.approx(1.0)
    assert [p.batch_size for p in result.measured] == [100, 328, 800]
    assert [p.samples_per_s for p in result.measured] == [200.0, 656.0, 1600.0]
    assert result.lr == 0.8
    assert result.message == (
        "A batch of 800 holds 1 of 1 GiB (size of all tensors): memory is the limit. Learning rate to try: 0.8, scaled"
        " from 0.1 at batch size 100 (linear rule for SGD); a starting point only."
    )
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] fp32, batch size 100: 0.3 GiB, 0 s",
        "[2/3] fp32, batch size 328: 0.528 GiB, 0 s",
        "[3/3] fp32, batch size 800: 1 GiB, 0 s",
    ]


def test_another_precision_begins_where_the_first_one_ended() -> None:
    runs = MadeUp(linear)
    both = BatchSizeSearch(runs, 1.0, Progress(6, None))  # type: ignore[arg-type]
    both.run(ARM)
    runs.sizes.clear()
    runs.memory, runs.facts = lambda rows: 0.2 + 0.0005 * rows, replace(FACTS, rates=(UsedRate("Adam", 0.1),))
    result, _ = both.run(ARM)
    assert runs.sizes == [800, 1328, 1600]
    assert result.lr == pytest.approx(0.707)
    assert "at batch size 32" in result.message


def test_the_rows_are_the_limit() -> None:
    result = search(MadeUp(linear, replace(FACTS, num_rows=50)))
    assert result.batch_size == 50
    assert result.message.startswith("A batch of all 50 rows holds 0.25 of 1 GiB (size of all tensors): the data is")


def test_fewer_rows_than_the_first_size() -> None:
    runs = MadeUp(linear, replace(FACTS, own_size=64, num_rows=50))
    assert search(runs).batch_size == 50
    assert runs.sizes == [None]


def test_drop_last_leaves_no_batch() -> None:
    class Dropped(MadeUp):
        def noted(self, rows: int) -> Facts:
            return replace(self.facts, own_size=rows, num_batches=9 if rows <= 50 else 0)

    runs = Dropped(linear, replace(FACTS, own_size=64, num_rows=50))
    result = search(runs)
    assert runs.sizes == [None, 50]
    assert result.batch_size == 50
    assert "at batch size 64" in result.message


@pytest.mark.parametrize("rows", [0, None, 1000])
def test_no_batches_at_all(rows: int | None) -> None:
    runs = MadeUp(linear, replace(FACTS, num_batches=0, num_rows=rows))
    runs.noted = lambda rows: runs.facts  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="must have batches; `train_dataloader` gives none"):
        search(runs)


def test_a_stream_that_ends() -> None:
    class Stream(MadeUp):
        def noted(self, rows: int) -> Facts:
            return replace(self.facts, own_size=rows, loader_sizes=(rows,), batch_rows=min(rows, 300))

    result = search(Stream(lambda rows: 0.2 + 0.001 * min(rows, 300)))
    assert result.batch_size == 300
    assert "all 300 rows" in result.message


@pytest.mark.parametrize("sizes", [(16,), (None,), ()])
def test_batches_that_do_not_follow(sizes: tuple[int | None, ...]) -> None:
    """If the loader does not say its size, the rows of its batches are compared."""
    runs = MadeUp(lambda rows: 0.3)
    runs.noted = lambda rows: replace(runs.facts, own_size=rows, loader_sizes=sizes, batch_rows=16)  # type: ignore
    message = (
        r"must change with `batch_size`: it was 32, then \d+, and a batch had 16 rows each time. Write `DataLoader"
    )
    with pytest.raises(ValueError, match=message):
        search(runs)
    assert len(runs.sizes) == 2


def test_a_loader_with_half_of_it() -> None:
    class Half(MadeUp):
        def noted(self, rows: int) -> Facts:
            return replace(self.facts, own_size=rows, loader_sizes=(rows // 2, rows // 2), batch_rows=rows // 2)

    assert search(Half(linear, replace(FACTS, num_rows=100))).batch_size == 200


def test_rows_are_not_the_first_dimension() -> None:
    runs = MadeUp(linear)
    runs.noted = lambda rows: replace(runs.facts, own_size=rows, loader_sizes=(rows,), batch_rows=20)  # type: ignore
    result = search(runs)
    assert result.batch_size == 800
    assert result.samples_per_s == 1600.0  # from the time of a step


def test_nothing_fits() -> None:
    runs = MadeUp(lambda rows: 2.0 + rows)
    message = (
        r"`memory_limit_gib` must hold the smallest batch; in fp32 a batch of 1 holds 3 GiB, and the limit is 1 GiB"
    )
    fails(runs, LimitTooLowError, message)
    assert runs.sizes[-1] == 1


def test_a_single_row_that_a_module_does_not_take() -> None:
    class Norm(MadeUp):
        def outcome(self, rows: int) -> Run:
            one = Run("fp32", 0, error="ValueError: Expected more than 1 value per channel when training")
            return one if rows == 1 else super().outcome(rows)

    message = "a batch of 4 holds 2 GiB.*A batch of 1 failed: ValueError: Expected more"
    fails(Norm(lambda rows: 2.0), LimitTooLowError, message)


def test_memory_that_runs_out_on_a_device() -> None:
    """The size of a run that ran out of memory does not fit."""
    runs = MadeUp(lambda rows: linear(rows) if rows <= 500 else math.inf, replace(FACTS, device="cuda", device_gib=1.0))
    result = search(runs, limit=None)
    assert 480 <= result.batch_size <= 500
    assert result.limit_gib == 1.0
    assert "memory is the limit. Memory ran out at 5" in result.message
    assert "tensors" not in result.message


def test_memory_runs_out_before_the_first_batch() -> None:
    class Late(MadeUp):
        def noted(self, rows: int) -> Facts:
            known = super().noted(rows)
            return known if rows < 10 else replace(known, device="", device_gib=None, num_batches=0)

    runs = Late(lambda rows: linear(rows) if rows < 10 else math.inf, replace(FACTS, device="cuda", device_gib=1.0))
    assert search(runs, limit=None).batch_size == 9


def test_the_limit_is_the_smaller_one() -> None:
    facts = replace(FACTS, device="cuda", device_gib=0.8)
    assert search(MadeUp(linear, facts)).limit_gib == 0.8


def test_a_device_that_does_not_say_what_it_has() -> None:
    with pytest.raises(ValueError, match="`memory_limit_gib` must be given: training runs on mps, which does not say"):
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
    fails(Broken(linear), RunFailedError, message)


def test_killed_before_anything_is_known() -> None:
    runs = MadeUp(linear)
    runs.run = lambda arm, size: (Run("fp32", 0, error="its process was killed by SIGKILL"), Facts())  # type: ignore
    fails(runs, RunFailedError, r"^Training in fp32 failed: its process was killed by SIGKILL")


def test_memory_that_could_not_be_measured() -> None:
    runs = MadeUp(linear)
    runs.outcome = lambda rows: Run("fp32", 0)  # type: ignore[method-assign]
    fails(runs, RunFailedError, "another torch profiler was running")


def test_what_an_optimizer_step_sees() -> None:
    facts = replace(FACTS, accumulated=4, world_size=2)
    assert "An optimizer step sees 8 such batches." in search(MadeUp(linear, facts)).message
