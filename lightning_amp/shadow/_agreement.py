"""Let all ranks arrive before one of them begins a collective operation in a second run, so that none waits forever."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import final

from lightning_amp.shadow._ranks import OtherRankFailedError

_NUMBERS = itertools.count()
"""Numbers of agreements. All ranks make the same ones, so a number means the same on all of them."""

_FIRST_PAUSE, _LAST_PAUSE = 2e-4, 2e-2
"""Seconds between two looks into the store."""


@final
class RankMissingError(BaseException):
    """Another rank does not answer. No step can run any more, so no code should catch this as an ordinary error."""


@final
class Agreement:
    """Makes a piece of work succeed on all ranks, or fail on all.

    The ranks exchange words through the store by which they found each other, not by collective operations: a rank
    that has failed can still write there. All ranks must enter :meth:`working` together, and arrive in the same order.

    Args:
        limit: The longest time that a rank waits for another one.

    Cost: two or three messages to the store for each collective operation.
    """

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._store = _store(f"lightning_amp/{next(_NUMBERS)}/")
        self._arrivals: Counter[str] = Counter()

    @contextmanager
    def working(self) -> Generator[None]:
        """Run work inside.

        Raises:
            OtherRankFailedError: If the work failed on another rank, and not on this one.
            RankMissingError: If another rank does not arrive within the limit.
        """
        try:
            yield
        except Exception:
            with self._words():
                self._store.set("failed", "1")
                self._await_everybody()
            raise
        with self._words():
            self._await_everybody()
            if self._store.check(["failed"]):
                raise OtherRankFailedError

    def arrive(self, group: str, size: int) -> None:
        """Wait until all ranks of a process group have arrived, before their next collective operation.

        Raises:
            OtherRankFailedError: If another rank has failed, and will not take part.
            RankMissingError: If another rank does not arrive within the limit.
        """
        with self._words():
            if not self._all_arrive(group, size):
                raise OtherRankFailedError

    def _await_everybody(self) -> None:
        self._all_arrive("end", self._size, whatever=True)

    def _all_arrive(self, group: str, size: int, *, whatever: bool = False) -> bool:
        self._arrivals[group] += 1
        key = f"{group}/{self._arrivals[group]}"
        if self._store.add(key, 1) < size:
            return self._answer(f"{key}/answer", whatever) == b"go"
        # The last rank decides, and also removes what the ranks have read at their last meeting.
        before = f"{group}/{self._arrivals[group] - 1}"
        for old in (before, f"{before}/answer"):
            self._store.delete_key(old)
        go = whatever or not self._store.check(["failed"])
        return self._store.compare_set(f"{key}/answer", "", "go" if go else "stop") == b"go"

    def _answer(self, key: str, whatever: bool) -> bytes:
        end, pause = time.monotonic() + self._limit.total_seconds(), _FIRST_PAUSE
        while not self._store.check([key]):  # the store's own `wait` prints a warning when it gives up
            if not whatever and self._store.check(["failed"]):
                return self._store.compare_set(key, "", "stop")
            if time.monotonic() > end:
                raise self._missing()
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
        return self._store.get(key)

    def _missing(self) -> RankMissingError:
        self._store.set(f"waits/{self._rank}", "1")
        time.sleep(min(2.0, self._limit.total_seconds() / 2))  # the others come to the end of their limit, too
        missing = [rank for rank in range(self._size) if not self._store.check([f"waits/{rank}"])]
        return _missing(f"rank {', '.join(map(str, missing))}" if missing else "another rank", self._limit)

    @contextmanager
    def _words(self) -> Generator[None]:
        try:
            yield
        except torch.distributed.DistError:  # the process that keeps the store has ended
            raise _missing("rank 0", self._limit) from None


def _missing(ranks: str, limit: timedelta) -> RankMissingError:
    return RankMissingError(
        f"A callback of lightning_amp runs a step a second time on all ranks, and {ranks} did not answer within"
        f" {limit.total_seconds():g} s (the strategy's `timeout`). Look at the log of that rank: its process has ended,"
        " or it runs something else."
    )


def collective(agreement: Agreement, func: Any, args: Any, kwargs: Any) -> None:
    """Arrive at a collective operation, if this operation is one."""
    group = _process_group(func, args, kwargs)
    if group is not None and group.size() > 1:
        agreement.arrive(group.group_name, group.size())


def _store(prefix: str) -> Any:
    """Return the store by which the ranks found each other, for keys with a prefix. Remove when torch exports it."""
    return torch.distributed.PrefixStore(prefix, torch.distributed.distributed_c10d._get_default_store())


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
