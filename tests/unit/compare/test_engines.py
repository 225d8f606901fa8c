"""Whole comparisons on devices of this machine: bits and verdicts as of one run after the other.

`tests/docs/test_howto.py` runs submitit and Dask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zoo.compared import TRAINER, Sea, Waves, here
from zoo.processes import DiesOnce

import lightning_amp
from lightning_amp import LocalDevices
from lightning_amp.compare import _compare

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

KWARGS: dict[str, Any] = {
    "precisions": ("fp32", "bf16"),
    "seed": 0,
    "num_seeds": 4,
    "control": True,
    "margins": {"val_loss": 0.05, "distance": 0.001},
    "trainer_kwargs": {**TRAINER, "max_epochs": 1},
}


@pytest.fixture(autouse=True)
def without_the_name_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest changes it while a test runs, and runs with another environment need another server."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)


def bits(report: lightning_amp.PrecisionReport) -> dict[tuple[str, int], Any]:
    return {
        (label, run.seed): (
            {name: [(point.step, point.value) for point in points] for name, points in run.curves.items()},
            [(point.step, point.value) for point in run.loss],
            run.same_weights,
            (run.num_steps, run.num_skipped, run.error),
        )
        for label, arm in report.arms.items()
        for run in arm.runs
    }


def verdicts(report: lightning_amp.PrecisionReport) -> dict[tuple[str, str], str]:
    return {
        (label, name): str(report.verdict(label, name)) for label, arm in report.arms.items() for name in arm.metrics
    }


def test_local_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = LocalDevices(num=2)
    report = lightning_amp.compare_precisions(Waves, Sea, **KWARGS, executor=devices)
    devices.shutdown()
    assert "[12/12]" in capsys.readouterr().err
    monkeypatch.setattr(_compare, "run_in_process", here)
    in_order = lightning_amp.compare_precisions(Waves, Sea, **KWARGS)
    assert len(bits(report)) == 12
    assert bits(report) == bits(in_order)
    assert verdicts(report) == verdicts(in_order)
    assert len(verdicts(report)) == 3 * len(report.arms)
    assert {run.devices for arm in report.arms.values() for run in arm.runs} == {("cpu",)}
    assert report.arms["bf16"].speed is None
    assert report.arms["bf16"].not_compared == "runs shared a device"


def test_runs_that_are_killed_in_any_moment_fail_and_a_second_call_repeats_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "died").mkdir()
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    kwargs = {**KWARGS, "precisions": ("fp32",), "num_seeds": 5, "control": False, "dirpath": tmp_path / "kept"}
    first = lightning_amp.compare_precisions(DiesOnce, Sea, **kwargs, executor=LocalDevices(num=2))
    assert list(first.arms["fp32"].errors) == [0, 1, 2, 3]
    assert all("was killed by SIGKILL" in error for error in first.arms["fp32"].errors.values())
    again = lightning_amp.compare_precisions(DiesOnce, Sea, **kwargs, executor=LocalDevices(num=2))
    monkeypatch.setattr(_compare, "run_in_process", here)
    assert bits(again) == bits(lightning_amp.compare_precisions(Waves, Sea, **{**kwargs, "dirpath": None}))
