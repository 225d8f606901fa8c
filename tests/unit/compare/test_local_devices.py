"""Places on this machine: without runs, and with a whole comparison.

`tests/docs/test_howto.py` runs submitit and Dask."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from support.approved import assert_refused
from zoo.compared import TRAINER, Sea, Waves, here

import lightning_amp
from lightning_amp.compare import LocalDevices, _compare
from lightning_amp.compare._local_devices import _places, visible_devices
from lightning_amp.compare._process import HERE


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, number: int = 4, cores: int = 8) -> None:
    """Pretend a machine with accelerators and CPU cores."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + cores)), raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda")


def environments(*args: Any, name: str = "CUDA_VISIBLE_DEVICES") -> list[str]:
    return [environment[name] for environment, _ in _places(*args)]


# -- accelerators ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("args", "seen"),
    [
        ((None, 1, None), ["0", "1", "2", "3"]),
        ((None, 1, 2), ["0", "1"]),
        ((None, 1, 9), ["0", "1", "2", "3"]),
        ((None, 2, None), ["0,1", "2,3"]),
        ((None, 3, None), ["0,1,2"]),
        ((None, 2, 1), ["0,1"]),
        (([2, 0], 1, None), ["2", "0"]),
        (([3, 1], 2, None), ["3,1"]),
        ((["GPU-7f3a", "GPU-1b"], 1, None), ["GPU-7f3a", "GPU-1b"]),
        (([3, "GPU-1b"], 1, None), ["3", "GPU-1b"]),
    ],
)
def test_places_with_accelerators(args: Any, seen: list[str]) -> None:
    assert environments(*args) == seen
    assert all(cores == () for _, cores in _places(*args))


@pytest.mark.usefixtures("four")
def test_a_process_that_sees_some_devices_gives_these_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count from 0 among the devices that this process sees, as they do in torch."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7 ,GPU-7f3a")
    assert visible_devices("cuda") == ["5", "7", "GPU-7f3a"]
    assert environments(None, 1, None) == ["5", "7", "GPU-7f3a"]
    assert environments([1, 2], 1, None) == ["7", "GPU-7f3a"]
    with pytest.raises(ValueError, match=r"numbers below 3, or names, or `None`; got \[0, 3\]"):
        LocalDevices([0, 3])


def test_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu", 2)
    assert environments(None, 1, None, name="ZE_AFFINITY_MASK") == ["0", "1"]
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3,4")
    assert environments(None, 1, None, name="ZE_AFFINITY_MASK") == ["3", "4"]


@pytest.mark.usefixtures("four")
def test_wrong_arguments() -> None:
    devices = ["0,1", [0.5], [4], [-1, 0], [1, 1], [], 2, [True]]
    numbers: list[dict[str, Any]] = [{"per_run": 5}, {"per_run": 0}, {"num": 0}, {"num": 1.5}]
    assert_refused("LocalDevices", LocalDevices, [*({"devices": wrong} for wrong in devices), *numbers])


# -- CPUs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "share"), [(2, 4), (3, 2), (8, 1)])
def test_cores_are_divided_without_overlap(num: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    places = _places(None, 1, num)
    cores = [core for _, share in places for core in share]
    assert [len(cores) for _, cores in places] == [share] * num
    assert len(set(cores)) == len(cores)
    assert set(cores) <= set(range(10, 18))
    assert all(environment == {} for environment, _ in places)


@pytest.mark.parametrize("num", [None, 1])
def test_one_run_has_all_cores(num: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert _places(None, 1, num) == [({}, ())]
    assert len(LocalDevices(num=num)._places) == 1


@pytest.mark.parametrize("kind", [None, "mps"])
def test_wrong_arguments_without_accelerators(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind)
    wrong: list[dict[str, Any]] = [{"num": 9}, {"devices": [0]}, {"per_run": 2}]
    assert_refused("LocalDevices_on_a_CPU", LocalDevices, wrong)


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four")
def test_any_function() -> None:
    job = LocalDevices(num=1).submit(pow, 2, 3)
    assert job.result() == 8
    assert job.done()
    assert not job.cancel()
    with pytest.raises(ZeroDivisionError):
        LocalDevices().submit(divmod, 1, 0).result()
    assert HERE.environment == {}


@pytest.mark.usefixtures("four")
def test_no_two_running_jobs_share_a_place() -> None:
    running: list[str] = []
    most: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> str:
        name = HERE.environment["CUDA_VISIBLE_DEVICES"]
        with lock:
            assert name not in running
            running.append(name)
            most.append(len(running))
        time.sleep(0.002 * (number % 3))
        with lock:
            running.remove(name)
        if number % 7 == 0:
            raise KeyError(number)  # its place is free again
        return name

    devices = LocalDevices([3, 1, 0])
    jobs = [devices.submit(work, number) for number in range(40)]
    names = [job.result() for number, job in enumerate(jobs) if number % 7]
    assert set(names) <= {"3", "1", "0"}
    assert max(most) <= 3
    devices.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        devices.submit(pow, 2, 3)


@pytest.mark.usefixtures("four")
def test_a_cancelled_job() -> None:
    """A queued one never runs. A running one learns of it, and `run_packed` then kills its process."""
    begun = threading.Event()
    calls: list[int] = []

    def wait() -> bool:
        calls.append(1)
        begun.set()
        assert HERE.stop is not None
        return HERE.stop.wait(30)

    devices = LocalDevices(num=1)
    running, queued, last = devices.submit(wait), devices.submit(wait), devices.submit(pow, 2, 3)
    assert begun.wait(30)
    assert not running.done()
    assert queued.cancel()
    assert queued.done()
    with pytest.raises(CancelledError):
        queued.result()
    assert running.cancel()
    assert running.result() is True
    assert last.result() == 8
    assert len(calls) == 1
    assert not running.cancel()


# -- a whole comparison ------------------------------------------------------------------------------------------------

KWARGS: dict[str, Any] = {
    "precisions": ("fp32", "bf16"),
    "seed": 0,
    "num_seeds": 4,
    "control": True,
    "margins": {"val_loss": 0.05, "distance": 0.001},
    "trainer_kwargs": {**TRAINER, "max_epochs": 1},
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


@pytest.mark.slow
@pytest.mark.cpu
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
