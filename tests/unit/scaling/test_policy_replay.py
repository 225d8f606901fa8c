"""Replay a record under another scale policy, with the steps that the record decides and the assumed ones."""

from __future__ import annotations

import inspect
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scale_runs import scale_run

from lightning_amp.findings import StepRecord
from lightning_amp.reports import ScaleHistory
from lightning_amp.scaling import POLICY_SETTINGS, DynamicLossScaler, ReplayedRun, replay_policy, scaler_of_policy

TRACES = json.loads((Path(__file__).parent / "traces.json").read_text())
TRACED = {"init_scale": 64.0, "growth_interval": 4, "min_scale": 1.0, "max_consecutive_skips": 100}


def replayed(records: list[StepRecord], assume_overflow: bool = False, **policy: Any) -> ReplayedRun:
    scaler = scaler_of_policy(policy, records[0].scale)
    return replay_policy(records, scaler, assume_overflow=assume_overflow)


def each_step(run: ReplayedRun) -> list[StepRecord]:
    """Return all steps of a run, also between two records."""
    steps: list[StepRecord] = []
    for record in run.records:
        while steps and steps[-1].index + 1 < record.index:
            quiet = replace(record, index=steps[-1].index + 1, next_scale=record.scale, skipped=False, reason="none")
            steps.append(quiet)
        steps.append(record)
    return steps


# -- the policy that recorded it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", TRACES["patterns"])
@pytest.mark.parametrize(("policy", "hysteresis"), [("torch (hysteresis 1)", 1), ("megatron", 2)])
@pytest.mark.parametrize("assume_overflow", [False, True])
def test_the_policy_that_recorded_gives_the_known_traces(
    policy: str, hysteresis: int, pattern: str, assume_overflow: bool
) -> None:
    overflows = TRACES["patterns"][pattern]
    expected = next(traces for name, traces in TRACES["policies"].items() if name.startswith(policy))[pattern]
    history = scale_run(overflows, **TRACED, hysteresis=hysteresis)
    run = replayed(list(history), assume_overflow, **TRACED, hysteresis=hysteresis)
    assert [step.next_scale for step in each_step(run)] == expected
    assert run.num_decided == len(overflows)


@given(
    pattern=st.text(alphabet="...OL", min_size=1, max_size=80),
    policy=st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from([2.0, 64.0, 2.0**14]),
            "growth_factor": st.sampled_from([2.0, 1.5, 4.0]),
            "backoff_factor": st.sampled_from([0.5, 0.25]),
            "growth_interval": st.integers(1, 7),
            "hysteresis": st.integers(1, 3),
            "min_scale": st.sampled_from([1.0, 2.0**-14]),
            "max_scale": st.sampled_from([2.0**14, 2.0**15]),
        }
    ),
    assume_overflow=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_policy_that_recorded_gives_the_record(pattern: str, policy: dict[str, Any], assume_overflow: bool) -> None:
    policy["max_consecutive_skips"] = 100
    history = scale_run(pattern, **policy)
    run = replayed(list(history), assume_overflow, **policy)
    again = ScaleHistory()
    again.extend(run.records)
    assert list(again) == list(history)
    assert run.num_decided == len(pattern)
    assert run.stopped_at is None


def test_the_stop_of_the_policy_that_recorded() -> None:
    history = scale_run("..O" + "O" * 4, growth_interval=2, max_consecutive_skips=100)
    assert replayed(list(history), growth_interval=2, max_consecutive_skips=4).stopped_at == 5
    assert replayed(list(history), growth_interval=2, max_consecutive_skips=4).records[-1].index == 5
    assert replayed(list(history), growth_interval=2, max_consecutive_skips=6).stopped_at is None
    apart = scale_run("OO...OO..OO", max_consecutive_skips=100)
    assert replayed(list(apart), max_consecutive_skips=3).stopped_at is None
    losses = scale_run("OLLO.", max_consecutive_skips=100)
    assert replayed(list(losses), max_consecutive_skips=4).stopped_at == 3


# -- what is left out of a record --------------------------------------------------------------------------------------


@given(
    pattern=st.text(alphabet=".......OL", min_size=1, max_size=120),
    policy=st.fixed_dictionaries(
        {"init_scale": st.sampled_from([16.0, 2.0**16]), "growth_interval": st.integers(1, 9)}
    ),
    assume_overflow=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_clean_steps_that_are_left_out_count_as_if_they_were_not(
    pattern: str, policy: dict[str, Any], assume_overflow: bool
) -> None:
    """The replay jumps over clean steps. The result must equal a replay of each step."""
    history = scale_run(pattern, init_scale=1024.0, growth_interval=5, max_consecutive_skips=200)
    full = each_step(ReplayedRun(list(history), 0, None))
    assert len(full) == len(pattern)
    short, long = (replayed(records, assume_overflow, **policy) for records in (list(history), full))
    assert each_step(short) == each_step(long)
    assert (short.num_decided, short.stopped_at) == (long.num_decided, long.stopped_at)


def test_a_million_clean_steps_cost_nothing() -> None:
    first, last = (StepRecord(i, 0, 1024.0, 1024.0, skipped=False, reason="none") for i in (0, 999_999))
    run = replayed([first, last], growth_interval=100_000)
    assert len(run.records) < 30
    assert run.records[-1].next_scale == 2.0**20
    assert run.num_decided == 100_000  # up to the first growth


# -- what the record decides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "scale", "skips", "decided"),
    [
        ("O", 1024.0, (1, 1), 1),
        ("O", 2048.0, (1, 1), 1),
        ("O", 512.0, (0, 1), 0),
        (".", 1024.0, (0, 0), 1),
        (".", 512.0, (0, 0), 1),
        (".", 2048.0, (0, 1), 0),
        ("L", 1024.0, (1, 1), 1),
        ("L", 2048.0, (1, 1), 1),
        ("L", 512.0, (1, 1), 1),
    ],
)
def test_an_overflow_decides_upwards_and_a_clean_step_downwards(
    step: str, scale: float, skips: tuple[int, int], decided: int
) -> None:
    records = list(scale_run(step, init_scale=1024.0))
    for assume_overflow, skipped in zip((False, True), skips, strict=True):
        run = replayed(records, assume_overflow, init_scale=scale)
        assert run.records[0].skipped == bool(skipped)
        assert run.num_decided == decided
        lowered = skipped and step != "L"
        assert run.records[0].next_scale == (scale / 2 if lowered else scale)
        assert run.records[0].reason == {"L": "loss"}.get(step, "gradient" if skipped else "none")


def test_a_step_at_scale_0_decides_nothing() -> None:
    """Torch's scale can fall to 0. Then all gradients become NaN."""
    records = [StepRecord(0, 0, 0.0, 0.0, skipped=True, reason="gradient")]
    assert replayed(records, init_scale=1.0).num_decided == 0
    records = [StepRecord(0, 0, 0.0, 0.0, skipped=False, reason="none")]
    assert replayed(records, init_scale=1.0).num_decided == 0


def test_a_mended_overflow_lowers_the_scale_and_skips_nothing() -> None:
    records = [StepRecord(0, 0, 1024.0, 512.0, skipped=False, reason="none")]
    run = replayed(records, init_scale=4096.0)
    assert run.records == [StepRecord(0, 0, 4096.0, 2048.0, skipped=False, reason="none")]
    assert run.num_decided == 1
    assert replayed(records, init_scale=512.0).num_decided == 0


def test_assumed_overflows_push_the_scale_back_to_what_is_known() -> None:
    records = list(scale_run("." * 40, init_scale=1024.0))
    run = replayed(records, assume_overflow=True, init_scale=8192.0, growth_interval=10)
    scales = [step.next_scale for step in each_step(run)]
    assert scales[:3] == [4096.0, 2048.0, 1024.0]
    assert max(scales[3:]) == 2048.0  # grows after ten steps, and falls at once
    assert sum(step.skipped for step in each_step(run)) == 3 + 3


# -- several optimizers ------------------------------------------------------------------------------------------------


def several(batches: str, order: tuple[int, ...] = (0, 1), growth_interval: int = 3) -> list[StepRecord]:
    """Return steps of several optimizers. `.`: a clean batch. In `A` the first optimizer overflows, in `B` the last."""
    scaler, history = DynamicLossScaler(1024.0, growth_interval=growth_interval), ScaleHistory()
    for number, batch in enumerate(batches):
        scale = scaler.get_scale()
        scaler.advance(torch.tensor(float(batch != ".")))
        skipping = {"A": order[0], "B": order[-1], ".": None}[batch]
        for position, idx in enumerate(order):
            reason = "gradient" if idx == skipping else "none"
            index = number * len(order) + position
            history.extend([StepRecord(index, idx, scale, scaler.get_scale(), idx == skipping, reason)])
    return list(history)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)])
@pytest.mark.parametrize("batches", ["A......B..AB....", "........", "BA......"])
def test_several_optimizers_move_the_scale_once_per_batch(batches: str, order: tuple[int, ...]) -> None:
    records = several(batches, order)
    run = replayed(records, init_scale=1024.0, growth_interval=3)
    history = ScaleHistory()
    history.extend(run.records)
    assert list(history) == records
    assert run.num_decided == len(batches) * len(order)


def test_only_the_optimizer_that_overflowed_is_known_to_skip() -> None:
    records = several("B")
    skips = {
        assumed: [r.skipped for r in replayed(records, assumed, init_scale=4096.0).records] for assumed in (False, True)
    }
    assert skips == {False: [False, True], True: [True, True]}
    assert replayed(records, init_scale=4096.0).num_decided == 1
    assert [r.skipped for r in replayed(records, assume_overflow=True, init_scale=512.0).records] == [False, True]


def step(index: int, optimizer_idx: int, scale: float = 4.0, next_scale: float = 4.0) -> StepRecord:
    return StepRecord(index, optimizer_idx, scale, next_scale, skipped=False, reason="none")


@pytest.mark.parametrize(
    "records",
    [
        [step(0, 0), step(1, 0), step(2, 1)],  # a critic that steps twice
        [step(0, 0), step(1, 1), step(2, 1)],
        [step(0, 1), step(1, 1), step(2, 1)],  # the first optimizer never steps
        [step(0, 0, 4.0, 2.0), step(1, 1, 2.0, 2.0)],  # in batches of their own
        [step(0, 0), step(2, 0, 4.0, 2.0), step(5, 1, 2.0, 2.0)],  # a batch that moved the scale has only one record
    ],
)
def test_other_batches_of_several_optimizers_are_refused(records: list[StepRecord]) -> None:
    with pytest.raises(ValueError, match="2 optimizers cannot be replayed. .* once per batch. At step"):
        replayed(records)


def test_a_record_that_ends_within_a_batch() -> None:
    records = [*several("A..."), step(8, 0, 1024.0, 1024.0)]
    run = replayed(records, growth_interval=3)
    assert run.records[-1] == records[-1]
    assert run.num_decided == 9


# -- the settings ------------------------------------------------------------------------------------------------------


def test_the_first_scale_is_the_recorded_one_within_the_limits() -> None:
    assert scaler_of_policy({}, 512.0).get_scale() == 512.0
    assert scaler_of_policy({"init_scale": 4.0}, 512.0).get_scale() == 4.0
    assert scaler_of_policy({"max_scale": 64.0}, 512.0).get_scale() == 64.0
    assert scaler_of_policy({"min_scale": 1024.0}, 512.0).get_scale() == 1024.0
    assert scaler_of_policy({}, 2.0**40).get_scale() == 2.0**24
    assert scaler_of_policy({}, 0.0).get_scale() == 2.0**-14


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"interval": 3}, "settings init_scale, .*max_consecutive_skips.*'interval'"),
        ({"device": "cpu"}, "got 'device'"),
        ({"enabled": False}, "got 'enabled'"),
        ({"growth_interval": 0}, "`growth_interval` must be an integer of 1 or more"),
        ({"backoff_factor": 2}, "`backoff_factor` must be"),
        ({"min_scale": "x"}, "`min_scale` must be"),
        ({"init_scale": 2.0**30}, "`init_scale` must be a number from `min_scale`"),
    ],
)
def test_illegal_settings(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaler_of_policy(policy, 1024.0)


def test_every_setting_of_the_scaler_is_one_of_a_policy() -> None:
    arguments = set(inspect.signature(DynamicLossScaler).parameters)
    assert set(POLICY_SETTINGS) == arguments - {"device", "enabled"}


def test_a_long_run_with_rare_overflows() -> None:
    draw = random.Random(0)
    pattern = "".join("O" if draw.random() < 0.01 else "." for _ in range(3000))
    policy = {"init_scale": 2.0**12, "growth_interval": 50}
    history = scale_run(pattern, **policy)
    lower, upper = (replayed(list(history), assumed, init_scale=2.0**12, growth_interval=200) for assumed in (0, 1))
    assert sum(r.skipped for r in lower.records) < sum(r.skipped for r in upper.records)
    assert lower.num_decided < 3000
