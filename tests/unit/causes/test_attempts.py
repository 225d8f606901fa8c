"""Attempts end with the first that works, and all ranks run the same number of passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_amp.causes._attempts import Attempt, first_that_works
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


class Alone:
    world_size = 1


def attempts(ran: list[int], *works: bool) -> Iterator[Attempt[str, bool]]:
    for k, one in enumerate(works):

        def run(k: int = k, one: bool = one) -> bool:
            ran.append(k)
            return one

        yield Attempt(f"setting {k}", run)


def test_attempts_end_with_the_first_that_works() -> None:
    alone: Any = Alone()
    ran: list[int] = []
    assert first_that_works(Lockstep(alone), attempts(ran, False, True, True)) == [
        ("setting 0", False), ("setting 1", True),
    ]  # fmt: skip
    assert ran == [0, 1]
    assert first_that_works(Lockstep(alone), attempts([], True, False), lambda worked: not worked)[-1] == (
        "setting 1", False,
    )  # fmt: skip
    assert first_that_works(Lockstep(alone), []) == []


def test_an_attempt_may_be_built_from_the_result_of_the_one_before() -> None:
    alone: Any = Alone()
    seen: list[int] = []

    def widened() -> Iterator[Attempt[int, int]]:
        number = 1
        while True:
            yield Attempt(number, lambda number=number: seen.append(number) or number)
            number = seen[-1] * 3

    assert first_that_works(Lockstep(alone), widened(), lambda number: number > 5) == [(1, 1), (3, 3), (9, 9)]


def test_ranks_run_as_many_passes(on_two_ranks: Any) -> None:
    def work(ranks: Lockstep, rank: int) -> tuple[list[int], int]:
        ran, idle = list[int](), list[int]()
        with ranks.until_all_are_done(lambda: idle.append(1)):
            first_that_works(ranks, attempts(ran, *[False] * (1 + 3 * rank)))
            if rank == 0:
                first_that_works(ranks, attempts(ran, True, False))
        return ran, len(idle)

    assert on_two_ranks(work) == [([0, 0], 2), ([0, 1, 2, 3], 0)]


@pytest.mark.parametrize("where", ["run", "attempts", "idle"])
def test_a_rank_that_fails_ends_it_for_all(where: str, on_two_ranks: Any) -> None:
    def fails() -> bool:
        raise ZeroDivisionError

    def work(ranks: Lockstep, rank: int) -> str:
        if where == "run":
            return ranks.run(fails if rank == 0 else lambda: "fine")  # type: ignore[return-value]
        with ranks.until_all_are_done(fails if where == "idle" else lambda: None):
            if where == "attempts":
                first_that_works(ranks, [Attempt("", fails)] if rank == 0 else attempts([], *[False] * 5))
            elif rank == 1:
                first_that_works(ranks, attempts([], *[False] * 5))
        return "done"

    first, second = on_two_ranks(work)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, OtherRankFailedError)


def test_flags_of_all_ranks(on_two_ranks: Any) -> None:
    assert on_two_ranks(lambda ranks, rank: (ranks.any(rank == 1), ranks.all(rank == 1), ranks.run(lambda: rank))) == [
        (True, False, 0), (True, False, 1),
    ]  # fmt: skip
