"""All ranks run the same number of passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_amp.shadow import Lockstep, OtherRankFailedError, _ranks


class Rank:
    """Stands for a trainer. Ranks are threads here."""

    world_size = 2

    def __init__(self, global_rank: int, barrier: threading.Barrier, said: dict[int, Any]) -> None:
        self.global_rank, self.barrier, self.said = global_rank, barrier, said

    def gather(self, value: Any) -> list[Any]:
        self.said[self.global_rank] = value
        self.barrier.wait(10)
        values = [self.said[rank] for rank in range(self.world_size)]
        self.barrier.wait(10)
        return values


@pytest.fixture
def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Lockstep, int], Any]], list[Any]]:
    """Run a function on two ranks, and return the result or the exception of each."""
    monkeypatch.setattr(_ranks, "gather", lambda trainer, value: trainer.gather(value))
    monkeypatch.setattr(_ranks, "_words", lambda trainer: SimpleNamespace(fail=lambda: None, are_heeded=True))

    def run(work: Callable[[Lockstep, int], Any]) -> list[Any]:
        barrier, said, ends = threading.Barrier(2), dict[int, Any](), dict[int, Any]()

        def one(rank: int) -> None:
            trainer: Any = Rank(rank, barrier, said)
            try:
                ends[rank] = work(Lockstep(trainer), rank)
            except Exception as error:
                ends[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [ends[0], ends[1]]

    return run


def test_a_rank_that_fails_ends_it_for_all(on_two_ranks: Any) -> None:
    def fails() -> str:
        raise ZeroDivisionError

    first, second = on_two_ranks(lambda ranks, rank: ranks.run(fails if rank == 0 else lambda: "fine"))
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, OtherRankFailedError)


def test_flags_of_all_ranks(on_two_ranks: Any) -> None:
    assert on_two_ranks(lambda ranks, rank: (ranks.any(rank == 1), ranks.all(rank == 1), ranks.run(lambda: rank))) == [
        (True, False, 0), (True, False, 1),
    ]  # fmt: skip
