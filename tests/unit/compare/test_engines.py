"""Whole comparisons on real engines: the same bits and verdicts as one run after the other."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zoo.compared import TRAINER, Sea, Waves, here
from zoo.executors import Inline, assignment_of
from zoo.processes import MOMENTS, DiesOnce

import lightning_amp
from lightning_amp import LocalDevices
from lightning_amp.compare import Comparison, _comparison
from lightning_amp.compare._fork_server import FORK_SERVER
from lightning_amp.compare._remote import Assignment

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

KWARGS: dict[str, Any] = {
    "precisions": ("fp32", "bf16"),
    "num_seeds": 4,
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
        patch.setattr(_comparison, "run_in_process", here)
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


def test_parts(in_order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_comparison, "run_in_process", here)
    for part in (3, 1, 2):
        assert len(Comparison(Waves, Sea, **KWARGS, dirpath=tmp_path).run_part(part, 3)) == 4
    report, missing = Comparison(Waves, Sea, **KWARGS, dirpath=tmp_path).collect()
    assert missing == []
    assert_same(report, in_order[4], 12)


# -- a worker that dies ------------------------------------------------------------------------------------------------


class Loses:
    """Loses the first attempt of the last seed before its process starts."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def submit(self, fn: Any, /, *args: Any) -> Any:
        assignment = assignment_of(*args)
        if assignment.tasks[0].seed == len(MOMENTS) and not assignment.first_attempt:
            return self._executor.submit(_lose)
        return self._executor.submit(fn, *args)


def _lose() -> None:
    raise ConnectionError("the node is gone")


def test_a_worker_that_is_killed_in_each_of_five_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is repeated once; nothing is lost, and the report says so."""
    (tmp_path / "died").mkdir()
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    kwargs = {**KWARGS, "precisions": ("fp32",), "num_seeds": 6, "control": False}
    report = lightning_amp.compare_precisions(
        DiesOnce, Sea, **kwargs, executor=Loses(LocalDevices(num=2)), dirpath=tmp_path / "kept"
    )
    assert sorted(path.name for path in (tmp_path / "died").iterdir()) == ["0", "1", "2", "3"]
    runs = report.arms["fp32"].runs
    assert [run.error for run in runs] == [None] * 6
    assert all("was killed by SIGKILL" in run.first_attempt for run in runs[:4])
    assert runs[4].first_attempt == "its worker was lost: ConnectionError: the node is gone"
    assert runs[5].first_attempt == ""
    monkeypatch.setattr(_comparison, "run_in_process", here)
    expected = lightning_amp.compare_precisions(Waves, Sea, **kwargs)
    assert bits(report) == bits(expected)
    said = report.to_markdown()
    assert all(f"`fp32`, seed {seed} was repeated: its worker was lost" in said for seed in range(5))
    assert "seed 5 was repeated" not in said
    again = lightning_amp.compare_precisions(DiesOnce, Sea, **kwargs, dirpath=tmp_path / "kept")
    assert again.arms["fp32"].runs == runs


def test_a_worker_that_is_lost_while_it_keeps_a_run(
    in_order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after its file is complete."""
    from lightning_amp.compare import _remote

    monkeypatch.setattr(_remote, "run_packed", _here_packed)

    def change(fn: Any, assignment: Assignment) -> Any:
        answer = fn(assignment)
        task = assignment.tasks[0]
        if assignment.first_attempt or task.label == "fp32":
            return answer
        path = Path(assignment.files[0].path)
        if task.seed == 0:
            path.unlink()
            path.with_name(f"{path.name}.tmp").write_text("{")
        raise ConnectionError("the node is gone")

    kwargs = {**KWARGS, "num_seeds": 2, "control": False, "dirpath": tmp_path}
    report = lightning_amp.compare_precisions(Waves, Sea, **kwargs, executor=Inline(change))
    assert_same(report, in_order[2], 4)
    assert len(list(tmp_path.glob("*-seed?.json"))) == 4
    assert all(run.first_attempt for run in report.arms["bf16"].runs)


def _here_packed(task: Any, folder: str, *_: Any) -> Any:
    import pickle
    from dataclasses import replace

    return here(replace(pickle.loads(task.pickled), work_folder=folder))


def test_no_process_is_left() -> None:
    assert FORK_SERVER._server is None
