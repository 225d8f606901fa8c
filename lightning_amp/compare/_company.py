"""Find runs that shared a device: their bits do not depend on that, but their times do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_amp.compare._run import ArmRun


def shared_a_device(run: ArmRun, runs: Sequence[ArmRun]) -> bool:
    """Return whether another run was on one of its devices at the same time, by the clock of their host."""
    return any(
        other is not run
        and run.host == other.host != ""
        and not set(run.devices).isdisjoint(other.devices)
        and run.started_at < other.ended_at
        and other.started_at < run.ended_at
        for other in runs
    )


def same_kind_of_device(run: ArmRun, other: ArmRun) -> bool:
    """Return whether two runs had devices of the same model, and as many threads."""
    return (run.device, run.num_threads) == (other.device, other.num_threads)
