"""Whole comparisons on real engines: the same bits and verdicts as one run after the other."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
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
    "control": None,
    "margins": {"val_loss": 0.05, "distance": 0.001},
    "trainer_kwargs": {**TRAINER, "max_epochs": 1},
}


@pytest.fixture(autouse=True)
def without_the_name_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest changes it while a test runs, and runs with another environment need another server."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)


@pytest.fixture(scope="module")
def in_order() -> dict[int, lightning_amp.PrecisionReport]:
    """Return the reports of one, two and four seeds, whose runs trained one after the other in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compare, "run_in_process", here)
        return {
            number: lightning_amp.compare_precisions(
                Waves, Sea, **{**KWARGS, "num_seeds": number, "control": number == 4}
            )
            for number in (1, 2, 4)
        }


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


def assert_same(report: lightning_amp.PrecisionReport, expected: lightning_amp.PrecisionReport, num_runs: int) -> None:
    assert len(bits(report)) == num_runs
    assert bits(report) == bits(expected)
    assert verdicts(report) == verdicts(expected)
    assert len(verdicts(report)) == 3 * len(report.arms)


def test_local_devices(in_order: Any, capsys: pytest.CaptureFixture[str]) -> None:
    devices = LocalDevices(num=2)
    report = lightning_amp.compare_precisions(Waves, Sea, **KWARGS, executor=devices)
    devices.shutdown()
    assert_same(report, in_order[4], 12)
    assert "[12/12]" in capsys.readouterr().err
    assert {run.devices for arm in report.arms.values() for run in arm.runs} == {("cpu",)}
    assert report.arms["bf16"].speed is None
    assert report.arms["bf16"].not_compared == "runs shared a device"


@pytest.fixture
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loud = logging.CRITICAL + 1
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=loud
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield client


def test_dask(in_order: Any, cluster: Any) -> None:
    report = lightning_amp.compare_precisions(Waves, Sea, **KWARGS, executor=cluster.get_executor())
    assert_same(report, in_order[4], 12)


def test_submitit(in_order: Any, tmp_path: Path) -> None:
    """Each job is a new process, which imports torch for seconds. So there are only two."""
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    kwargs = {**KWARGS, "num_seeds": 1, "control": False}
    report = lightning_amp.compare_precisions(Waves, Sea, **kwargs, executor=executor, dirpath=tmp_path / "kept")
    assert_same(report, in_order[1], 2)
    assert len(list((tmp_path / "kept").glob("*-seed?.json"))) == 2


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
