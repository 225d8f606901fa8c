"""Let all ranks take part in second runs: they exchange values, and a second run that fails on one rank ends on all."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._compat._names import Trainer

T = TypeVar("T")

_FIRST_PAUSE, _LAST_PAUSE = 2e-4, 2e-2
"""Seconds between two looks into the store."""


@final
class OtherRankFailedError(RuntimeError):
    """Another rank could not continue, so this rank must stop, too; the other rank has the original error."""

    def __init__(self) -> None:
        super().__init__("it failed on another rank")


@final
class RankMissingError(BaseException):
    """Another rank does not answer. No step can run any more, so no code should catch this as an ordinary error."""


def gather(trainer: Trainer, value: T) -> list[T]:
    """Return `value` of every rank, in order; all must call.

    The values are pickled, so use it for small values and rare events only.
    """
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    with _modules.outside_dispatch_modes():
        torch.distributed.all_gather_object(values, value)
    _words(trainer).forget()
    return values


@contextmanager
def together(trainer: Trainer, *, agree: bool = False) -> Generator[None]:
    """Run code of the user a second time inside, so that it ends on all ranks if it fails on one of them.

    A rank that fails tells the other ranks. They stop before their next collective operation inside, so no collective
    operation of a second run meets another one. After a failure, the next :func:`gather` begins anew.

    Args:
        trainer: The trainer.
        agree: At the end, wait for all ranks, which must all enter this, and fail on all or on none.

    Raises:
        OtherRankFailedError: If the code failed on another rank, and not on this one.
        RankMissingError: If another rank does not arrive within the strategy's time limit.

    Cost: two or three messages to the store for each collective operation.
    """
    if trainer.world_size == 1:
        yield
        return
    words = _words(trainer)
    is_outer, words.are_heeded = not words.are_heeded, True
    try:
        with _Collectives(words) if is_outer else nullcontext():
            yield
    except Exception:
        words.fail()
        if agree:
            gather(trainer, True)
        raise
    finally:
        words.are_heeded = not is_outer
    if agree and any(gather(trainer, False)):
        raise OtherRankFailedError


@final
class _Words:
    """The words that ranks leave for each other in the store by which they found each other, until the next `gather`.

    A rank that has failed can still write there, while it takes no part in collective operations. All ranks call
    :func:`gather` equally often, so the number of calls means the same on all of them.
    """

    def __init__(self, root: Any, limit: timedelta) -> None:
        self.root, self.limit = root, limit
        self.are_heeded = False  # before collective operations
        self._number = 0
        self._arrivals = Counter[str]()
        self._store = torch.distributed.PrefixStore("lightning_amp/0/", root)

    def fail(self) -> None:
        self._store.set("failed", "1")

    def forget(self) -> None:
        """Begin anew, on all ranks."""
        for key in ("failed", *(f"{group}/{number}" for group, number in self._arrivals.items())):
            self._remove(key)
        self._number += 1
        self._arrivals.clear()
        self._store = torch.distributed.PrefixStore(f"lightning_amp/{self._number}/", self.root)

    def arrive(self, group: str, size: int) -> None:
        """Wait until all ranks of a process group have arrived, before their next collective operation.

        All of them return, or all raise.

        Raises:
            OtherRankFailedError: If another rank has failed, and will not take part.
            RankMissingError: If another rank does not arrive within the limit.
        """
        self._arrivals[group] += 1
        key, before = (f"{group}/{self._arrivals[group] - i}" for i in (0, 1))
        if self._store.add(key, 1) < size:
            goes = self._answer(f"{key}/answer")
        else:  # the last rank also removes what the ranks have read at their last meeting
            self._remove(before)
            goes = self._store.compare_set(f"{key}/answer", "", "go")
        if goes != b"go":
            raise OtherRankFailedError

    def _answer(self, key: str) -> bytes:
        end, pause = time.monotonic() + self.limit.total_seconds(), _FIRST_PAUSE
        while not self._store.check([key]):  # the store's own `wait` prints a warning when it gives up
            if self._store.check(["failed"]):
                return self._store.compare_set(key, "", "stop")
            if time.monotonic() > end:
                raise RankMissingError(
                    "A callback of lightning_amp runs a step a second time on all ranks, and another rank did not"
                    f" answer within {self.limit.total_seconds():g} s (the strategy's `timeout`). Look at the logs of"
                    " the other ranks: a process has ended, or it runs something else."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
        return self._store.get(key)

    def _remove(self, key: str) -> None:
        for old in (key, f"{key}/answer"):
            self._store.delete_key(old)


_known: list[_Words] = []


# Remove when torch exports the store, and strategies their time limit.
def _words(trainer: Any) -> _Words:
    root = torch.distributed.distributed_c10d._get_default_store()
    if not _known or _known[0].root is not root:
        _known[:] = [_Words(root, getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30))]
    return _known[0]


@final
class _Collectives(_modules.DispatchMode):
    """Lets all ranks arrive before one of them begins a collective operation."""

    supports_higher_order_operators = True

    def __init__(self, words: _Words) -> None:
        super().__init__()
        self._words = words

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        group = _process_group(func, args, kwargs or {})
        if group is not None and group.size() > 1:
            self._words.arrive(group.group_name, group.size())
        return func(*args, **(kwargs or {}))


def _process_group(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return the process group of a collective operation; `None` for all others, and between two ranks.

    Remove when torch tags collective operations.
    """
    found = _group_argument(operation)
    if found is None:
        return None
    position, by_name = found
    group = args[position] if position < len(args) else kwargs[operation._schema.arguments[position].name]
    if by_name:
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    return torch.distributed.ProcessGroup.unbox(group)


@functools.cache
def _group_argument(operation: Any) -> tuple[int, bool] | None:
    """Find the argument that is the group, or its name. Remove with `_process_group`."""
    namespace, name = getattr(operation, "namespace", ""), str(getattr(operation, "__name__", ""))
    if namespace not in ("c10d", "_c10d_functional") or name.startswith(("send", "recv")):
        return None
    for i, argument in enumerate(operation._schema.arguments):
        if argument.name == "group_name" or str(argument.type).endswith("ProcessGroup"):
            return i, argument.name == "group_name"
    return None
