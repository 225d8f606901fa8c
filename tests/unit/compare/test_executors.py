"""Runs on executors, which are trained by stand-ins; `test_local_devices.py` has real ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from zoo.executors import Inline, compare, trained_there

from lightning_amp.compare import _process

SEEDS: dict[str, Any] = {"num_seeds": 3, "margins": {"val_loss": 0.1}}


@pytest.fixture(autouse=True)
def trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "run_packed", trained_there)
    monkeypatch.setattr(_process, "_POLL_S", 0.001)
    monkeypatch.setattr(_process, "_STOP_WITHIN_S", 0.05)


def test_runs_that_end_in_any_order() -> None:
    usual = compare(Inline(), **SEEDS)
    assert str(compare(Inline(order=[8, 3, 0, 5, 1, 2, 4, 7, 6]), **SEEDS)) == str(usual)
    assert usual.verdict("bf16", "val_loss").claim == "not worse"


def test_a_worker_that_is_lost_or_refuses_does_not_end_the_others(tmp_path: Path) -> None:
    lost: list[BaseException] = [ConnectionError("the node is gone"), CancelledError(), ModuleNotFoundError("torch")]

    def change(job: Callable[[], Any], number: int) -> Any:
        if number < len(lost):
            raise lost[number]
        return job()

    report = compare(Inline(change), dirpath=tmp_path, **SEEDS)
    errors = [error for arm in report.arms.values() for error in arm.errors.values()]
    assert len(errors) == 3
    assert any(error.endswith("ConnectionError: the node is gone") for error in errors)
    assert report.verdict("bf16", "val_loss").claim == "undecided"
    assert sum(len(arm.finished) for arm in report.arms.values()) == 6
    executor = Inline()
    assert all(not arm.errors for arm in compare(executor, dirpath=tmp_path, **SEEDS).arms.values())
    assert len(executor.sent) == 3  # only those that were lost


def test_a_worker_with_other_packages_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(job: Callable[[], Any], number: int) -> Any:
        if number == 1:
            with monkeypatch.context() as patch:
                patch.setattr(_process, "versions", lambda: {**here, "torch": "1.0"})
                return job()
        return job()

    here = _process.versions()
    report = compare(Inline(change))
    assert report.arms["fp32"].errors == {}
    assert f"has other packages: torch is 1.0, not {here['torch']}" in report.arms["bf16"].errors[0]


def test_a_worker_without_this_package_fails_in_the_call() -> None:
    """A worker of Dask that cannot read a call ends, and the caller would wait for ever."""
    executor = Inline()
    compare(executor, ("fp32",))
    fn, args = pickle.loads(executor.sent[0])
    assert fn is pickle.loads
    assert isinstance(args[0], bytes)


def test_an_executor_that_takes_no_runs_is_an_error() -> None:
    class Closed:
        def submit(self, fn: Any, /, *args: Any) -> Any:
            raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        compare(Closed())
    with pytest.raises(ValueError, match=r"`executor` must be an object with `submit\(fn, \*args\)`"):
        compare("dask")


def test_an_interrupt_cancels_what_is_queued(tmp_path: Path) -> None:
    cancelled: list[int] = []

    class Cancels(Inline):
        def submit(self, fn: Any, /, *args: Any) -> Any:
            job: Any = super().submit(fn, *args)
            number = len(self.sent) - 1
            job.cancel = lambda: cancelled.append(number)
            return job

    def change(job: Callable[[], Any], number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        return job()

    with pytest.raises(KeyboardInterrupt):
        compare(Cancels(change), ("fp32", "bf16", "fp16"), dirpath=tmp_path)
    assert cancelled == [2]
    assert [path.name for path in tmp_path.glob("*.json")] == ["fp32-seed0.json"]
