"""Which runs shared a device."""

from __future__ import annotations

import pytest

from lightning_amp.compare._company import same_kind_of_device, shared_a_device
from lightning_amp.compare._run import ArmRun


def run(start: float, end: float, *devices: str, host: str = "a", label: str = "fp32") -> ArmRun:
    return ArmRun(label, 0, host=host, devices=devices or ("cuda:0",), started_at=start, ended_at=end)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (run(5, 15), True),
        (run(-5, 5), True),
        (run(2, 3), True),
        (run(-5, 15), True),
        (run(0, 10), True),
        (run(10, 20), False),  # it began when the first had ended
        (run(-10, 0), False),
        (run(20, 30), False),
        (run(5, 15, "cuda:1"), False),
        (run(5, 15, "cuda:1", "cuda:0"), True),
        (run(5, 15, "cpu"), False),
        (run(5, 15, host="b"), False),
        (run(5, 15, host=""), False),
    ],
)
def test_runs_that_shared_a_device(other: ArmRun, shared: bool) -> None:
    own = run(0, 10)
    assert shared_a_device(own, [own, other]) == shared
    assert shared_a_device(other, [own, other]) == shared


def test_runs_of_an_unknown_host_share_nothing() -> None:
    """Reports of earlier versions have no hosts."""
    assert not shared_a_device(run(0, 10, host=""), [run(0, 10, host="", label="bf16")])


def test_a_run_does_not_share_with_itself() -> None:
    own = run(0, 10)
    assert not shared_a_device(own, [own])


def test_a_run_that_failed_before_it_had_a_device() -> None:
    """Nothing is known of its device, so it disturbs no other run."""
    own, lost = run(0, 10), ArmRun("bf16", 0, error="lost", host="a", started_at=0.0, ended_at=10.0)
    assert not shared_a_device(own, [own, lost])


@pytest.mark.parametrize(
    ("changes", "same"),
    [({}, True), ({"device": "H100"}, False), ({"num_threads": 2}, False), ({"host": "b"}, True)],
)
def test_devices_of_the_same_model(changes: dict[str, object], same: bool) -> None:
    usual: dict[str, object] = {"device": "A100", "num_threads": 4, "host": "a"}
    own, other = (ArmRun("fp32", 0, **fields) for fields in (usual, usual | changes))  # type: ignore[arg-type]
    assert same_kind_of_device(own, other) == same
