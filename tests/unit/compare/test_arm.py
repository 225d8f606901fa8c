from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from support.synthetic import failed, make_run

from lightning_amp.compare import Run, Verdict
from lightning_amp.compare._arm import Arm, ArmMetric, Quartiles, mean
from lightning_amp.compare._stats import Difference
from lightning_amp.findings import StepRecord


def arm(*runs: Run) -> Arm:
    return Arm("fp16", "AmpPrecision('fp16')", False, False, runs, {}, None)


def metric(**fields: Any) -> ArmMetric:
    usual: dict[str, Any] = {
        "name": "val_loss",
        "direction": "min",
        "finals": {0: 1.0, 2: 3.0},
        "bests": {0: 0.5, 2: 1.5},
        "difference": Difference((0.1, 0.2, 0.3)),
        "margin": 0.1,
        "verdict": Verdict("no margin"),
        "evaluation_diff": {},
        "time_to_quality_s": {},
    }
    return ArmMetric(**(usual | fields))


def test_means_over_the_seeds() -> None:
    assert (metric().final, metric().best) == (2.0, 1.0)
    assert math.isnan(metric(finals={}).final)
    assert math.isnan(metric(bests={}).best)
    assert metric(finals={0: 1.0, 1: math.inf}).final == math.inf
    assert mean(iter([1.0, 2.0])) == 1.5


def test_times_of_all_seeds_that_finished() -> None:
    runs = [make_run("fp16", 0, step_s=None, samples_per_s=(10.0,)) for _ in range(2)]
    runs = [replace(runs[0], step_s=(1.0, 2.0)), replace(runs[1], step_s=(3.0,))]
    broken = replace(failed("fp16", 2), step_s=(100.0,), samples_per_s=(1.0,), peak_memory_bytes=10**12)
    found = arm(*runs, broken)
    assert found.step_s == Quartiles(1.5, 2.0, 2.5)
    assert found.samples_per_s == Quartiles(10.0, 10.0, 10.0)
    assert found.finished == runs
    assert found.peak_memory_bytes is None


def test_times_that_are_missing_or_wrong() -> None:
    """A clock may stand still, and a file may hold anything."""
    assert arm(make_run(step_s=None)).step_s is None
    assert arm().step_s is None
    assert arm(replace(make_run(), step_s=(0.0, -1.0, math.nan, math.inf))).step_s is None
    assert arm(replace(make_run(), step_s=(0.0, 2.0, math.nan, math.inf))).step_s == Quartiles(2.0, 2.0, 2.0)


def test_the_largest_peak_and_who_counted_it() -> None:
    peaks = [make_run("fp16", seed, peak_memory_bytes=peak, memory_of=peak and "device")
             for seed, peak in enumerate((None, 5, 7, 6))]  # fmt: skip
    assert (arm(*peaks).peak_memory_bytes, arm(*peaks).memory_of) == (7, "device")
    assert (arm(peaks[0]).peak_memory_bytes, arm(peaks[0]).memory_of) == (None, None)


def test_steps_of_all_seeds_and_the_last_scales() -> None:
    def record(index: int, scale: float) -> StepRecord:
        return StepRecord(index, 0, 2 * scale, scale, True, "gradient")

    found = arm(
        make_run(num_steps=7, num_skipped=3, scale=(record(0, 4.0), record(1, 2.0))),
        make_run(seed=1, num_steps=10, num_skipped=0),
        replace(failed("fp16", 2), num_steps=1, num_skipped=2, scale=(record(0, 1.0),)),
    )
    assert (found.num_steps, found.num_skipped) == (18, 5)
    assert found.final_scales == [2.0]


def test_shares_of_products_are_means_over_the_runs_that_counted() -> None:
    shares = [{"float32": 0.25, "float16": 0.75}, {}, {"float16": 1.0}]
    found = arm(*(make_run("fp16", seed, matmul_flops=share) for seed, share in enumerate(shares))).matmul_flops
    assert found == {"float16": 0.875, "float32": 0.125}
    assert list(found) == ["float16", "float32"]
    assert arm(make_run()).matmul_flops == {}


def test_errors_by_seed() -> None:
    assert arm(make_run(), failed("fp16", 1, "a"), failed("fp16", 4, "")).errors == {1: "a", 4: ""}
