from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from support.reports import make_report
from support.synthetic import failed

from lightning_amp.compare._run import ArmRun, Point
from lightning_amp.findings import StepRecord

FULL = ArmRun(
    "fp16, head | in <fp32>",
    3,
    precision="fp16",
    device="cpu: one",
    tf32=True,
    versions={"torch": "2.13.0"},
    curves={"val_loss": (Point(0, 0.0, 2.5), Point(10, 0.5, math.inf), Point(20, 1.0, -math.inf)), "val_acc": ()},
    directions={"val_loss": "min", "val_acc": "max"},
    loss=(Point(1, 0.1, 0.1 + 0.2), Point(2, 0.2, 5e-324)),
    same_weights={"val_loss": (1.0, -math.inf)},
    step_s=(0.01, 0.02),
    samples_per_s=(800.0,),
    timed_steps=(10, 12),
    train_s=1.5,
    total_s=math.inf,
    peak_memory_bytes=3 * 2**30,
    memory_of="device",
    num_steps=97,
    num_skipped=3,
    scale=(
        StepRecord(0, 0, 65536.0, 32768.0, True, "gradient"),
        StepRecord(7, 1, 32768.0, math.inf, False, "none"),
        StepRecord(9, 0, 1.0, 1.0, True, "loss"),
    ),
    matmul_flops={"float16": 0.98, "float32": 0.02},
    log="a\nb\x1b\udcff",
)


def through_json(run: ArmRun) -> ArmRun:
    return ArmRun.from_data(json.loads(json.dumps(run.to_data(), allow_nan=False)))


@pytest.mark.parametrize("run", [FULL, ArmRun("fp32", 0), failed("bf16", 2, "line\nline | `code`", log="x")])
def test_round_trip(run: ArmRun) -> None:
    found = through_json(run)
    assert found == run
    assert repr(found) == repr(run)  # tuples, not lists; a float, not an integer


def test_a_real_run_survives() -> None:
    for arm in make_report(4, 2).arms.values():
        assert tuple(map(through_json, arm.runs)) == arm.runs


def test_nan_survives() -> None:
    nan = math.nan
    run = through_json(
        replace(
            FULL,
            train_s=nan,
            curves={"a": (Point(1, nan, nan),)},
            loss=(Point(1, 0.0, nan),),
            same_weights={"a": (nan, 1.0)},
            step_s=(nan, nan),
            samples_per_s=(nan,),
            matmul_flops={"float32": nan},
            scale=(StepRecord(0, 0, nan, 1.0, False, "none"),),
        )
    )
    point = run.curves["a"][0]
    found = [run.train_s, point.train_s, point.value, run.loss[0].value, run.same_weights["a"][0]]
    found += [run.step_s[0], run.samples_per_s[0], run.matmul_flops["float32"], run.scale[0].scale]
    assert all(map(math.isnan, found))


def test_every_field_is_written() -> None:
    assert list(FULL.to_data()) == [field.name for field in fields(ArmRun)]


@pytest.mark.parametrize("data", [None, [], "run", 3, {}, {"label": "fp32", "seed": 0}, [FULL.to_data()]])
def test_other_data(data: object) -> None:
    with pytest.raises(ValueError, match="this is not a run of a comparison: .* has no `"):
        ArmRun.from_data(data)


RECORD = asdict(StepRecord(0, 0, 1.0, 1.0, False, "none"))
NEVER = [object(), b"", {1: 2}, [[]]]  # of no field
TORN: dict[str, list[Any]] = {
    "label": [None, 3],
    "seed": [None, "0", 1.0, -1, True],
    "error": [3, []],
    "precision": [None],
    "device": [None],
    "devices": [None, "cpu", [None]],
    "host": [None, 3],
    "num_threads": [None, -1, 1.5],
    "started_at": [None, "12", True],
    "ended_at": [None, [1.0]],
    "killed_by": [9, []],
    "first_attempt": [None, 1],
    "tf32": [None, 1, "false"],
    "versions": [None, {"torch": 2}, ["torch"]],
    "curves": [
        None, [], {"a": None}, {"a": 3}, {"a": [3]}, {"a": "123"}, {"a": [[1, 2.0]]}, {"a": [[1, 2.0, "x"]]},
        {"a": [[1.5, 2.0, 3.0]]}, {"a": [[math.inf, 2.0, 3.0]]}, {"a": [["1", 2.0, 3.0]]}, {"a": {"1": [1, 2, 3]}},
    ],
    "last_validation": [None, -1, 1.5],
    "directions": [None, ["min"], {"a": "up"}, {"a": None}],
    "loss": [None, {"1": 2}, [None], [[1, 2, 3, 4]], [[-1, 2, 3]]],
    "same_weights": [None, [], {"a": 1.0}, {"a": [1.0]}, {"a": ["1", "2"]}, {"a": "12"}],
    "step_s": [None, 0.01, "12", ["fast"], [None], [True], [10**400]],
    "samples_per_s": [None, {"a": 1}],
    "timed_steps": [None, 0.5, [-1], [0.5, 1]],
    "train_s": [None, "12", True],
    "total_s": [None, [1.0]],
    "peak_memory_bytes": ["1 GiB", -1, 1.5],
    "memory_of": ["gpu", 1],
    "num_steps": [None, 3.0, "3"],
    "num_skipped": [None, -3],
    "scale": [
        None, RECORD, [None], [{}], [[0, 0, 1.0, 1.0, False, "none"]], [{**RECORD, "scale": "large"}],
        [{**RECORD, "reason": "who knows"}], [{**RECORD, "skipped": 1}], [{**RECORD, "index": None}],
    ],
    "matmul_flops": [None, {"float32": "all"}, [1.0]],
    "log": [None, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", FULL.to_data())
def test_a_field_is_missing_or_torn(name: str) -> None:
    data = FULL.to_data()
    for wrong in [*NEVER, *TORN[name]]:
        with pytest.raises(ValueError, match=f"this is not a run of a comparison: its `{name}`: "):
            ArmRun.from_data({**data, name: wrong})
    del data[name]
    with pytest.raises(ValueError, match=f"has no `{name}`"):
        ArmRun.from_data(data)


def test_steps_and_their_times_go_together() -> None:
    with pytest.raises(ValueError, match="`timed_steps` and `step_s` differ in length"):
        ArmRun.from_data({**FULL.to_data(), "timed_steps": [1]})


def test_the_times_of_steps_by_their_number() -> None:
    assert FULL.seconds_of_steps() == {10: 0.01, 12: 0.02}
    assert replace(FULL, timed_steps=(), step_s=(0.1, math.nan, 0.0, 0.2)).seconds_of_steps() == {0: 0.1, 3: 0.2}


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    record = {**RECORD, "colour": "red"}
    run = ArmRun.from_data({**FULL.to_data(), "scale": [record], "mood": "good"})
    assert run == replace(FULL, scale=(StepRecord(0, 0, 1.0, 1.0, False, "none"),))
