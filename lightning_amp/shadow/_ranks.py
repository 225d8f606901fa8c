"""Exchange values between the ranks of a run, and let them run the same number of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from typing_extensions import final

T = TypeVar("T")


def gather(trainer: Trainer, value: T) -> list[T]:
    """Return `value` of every rank, in order; all must call.

    The values are pickled, so use it for small values and rare events only.
    """
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


@final
class OtherRankFailedError(RuntimeError):
    """Another rank could not continue, so this rank must stop, too; the other rank has the original error."""

    def __init__(self) -> None:
        super().__init__("it failed on another rank")


@final
class Lockstep:
    """Lets all ranks run the same number of passes, whatever each of them finds.

    A step may exchange values with the other ranks (`self.all_gather`, SyncBatchNorm). A rank that ran one step more
    than the others would wait forever.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return any(gather(self._trainer, flag))

    def all(self, flag: bool) -> bool:
        """Return whether `flag` is true on all ranks."""
        return all(gather(self._trainer, flag))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return its result; if it fails on one rank, raise on all.

        Raises:
            OtherRankFailedError: If it failed on another rank, and not on this one.

        """
        try:
            result = work()
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise OtherRankFailedError
        return result
