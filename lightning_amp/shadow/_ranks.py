"""Exchange values between the ranks of a run, and let them run the same number of passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

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
        self._is_led = False

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

    def go_on(self) -> None:
        """Announce one more pass within :meth:`until_all_are_done`.

        Raises:
            OtherRankFailedError: If another rank has failed.

        """
        if not self._is_led:
            self._states("on")

    @contextmanager
    def led_by(self, leader: int, work: Callable[..., bool]) -> Generator[Callable[..., bool] | None]:
        """Let one rank choose passes that all ranks then run in the same way, as sharded modules require.

        Args:
            leader: The number of the rank that chooses.
            work: Runs a pass, with keyword arguments that can be pickled; returns whether it worked on this rank.

        Yields:
            On the leader, a function that runs `work` on all ranks and returns whether it worked on all of them. On
            other ranks `None`: they follow at the end of the context.
        """

        def everywhere(**how: Any) -> bool:
            gather(self._trainer, how)
            return self.all(work(**how))

        leads = self._trainer.global_rank == leader
        self._is_led = True
        try:
            yield everywhere if leads else None
        finally:
            self._is_led = False
            if leads:
                gather(self._trainer, None)
        while not leads and (how := gather(self._trainer, None)[leader]) is not None:
            self.all(work(**how))

    @contextmanager
    def until_all_are_done(self, idle: Callable[[], object]) -> Generator[None]:
        """Let each rank run as many passes inside this context as it needs, each after a call of :meth:`go_on`.

        A rank that has finished runs `idle` until all ranks have. An exception inside ends the passes on all ranks.

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
