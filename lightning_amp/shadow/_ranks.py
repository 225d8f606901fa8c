"""The ranks of a run: what they tell each other, and how they run the same number of passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from typing_extensions import final

T = TypeVar("T")


def gather(trainer: Trainer, value: T) -> list[T]:
    """Return `value` of every rank, in order; all must call. It is pickled: for small things and rare events."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def gather_on_zero(trainer: Trainer, value: T) -> list[T]:
    """Return the same on rank 0, an empty list elsewhere."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * trainer.world_size if trainer.global_rank == 0 else None
    torch.distributed.gather_object(value, values)
    return values or []


@final
class OtherRankFailedError(RuntimeError):
    """Another rank could not go on, so that this one must not either; that one has the reason."""


@final
class Lockstep:
    """Lets all ranks run as many passes, whatever each of them finds.

    A step may talk to the other ranks (`self.all_gather`, SyncBatchNorm): a rank that ran one more would wait forever.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def any(self, flag: bool) -> bool:
        """Return whether it is true on one rank at least."""
        return any(gather(self._trainer, flag))

    def all(self, flag: bool) -> bool:
        """Return whether it is true on all ranks."""
        return all(gather(self._trainer, flag))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return its result. Where it fails it raises, on the others as well.

        Raises:
            OtherRankFailedError: If it failed elsewhere, and not here.

        """
        try:
            result = work()
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise OtherRankFailedError
        return result

    def go_on(self) -> None:
        """Announce one more pass within :meth:`until_all_are_done`.

        Raises:
            OtherRankFailedError: If a rank has failed in it.

        """
        self._states("on")

    @contextmanager
    def until_all_are_done(self, idle: Callable[[], object]) -> Generator[None]:
        """Let each rank run passes as it needs them, each after :meth:`go_on`; one that is done runs `idle` meanwhile.

        A rank that fails inside ends it for all.

        Raises:
            OtherRankFailedError: If another rank has failed.

        """
        try:
            yield
            while "on" in self._states("done"):
                idle()
        except OtherRankFailedError:
            raise
        except Exception:
            gather(self._trainer, "failed")
            raise

    def _states(self, mine: Literal["on", "done"]) -> list[str]:
        states = gather(self._trainer, str(mine))
        if "failed" in states:
            raise OtherRankFailedError
        return states
