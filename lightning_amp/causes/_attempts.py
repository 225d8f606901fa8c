"""Try remedies against a fault in order, until one works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import final

from lightning_amp.shadow import Lockstep

What = TypeVar("What")
Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True)
class Attempt(Generic[What, Result]):
    """A remedy to try."""

    what: What  # a setting written as code, or a `Remedy`
    run: Callable[[], Result]  # a function that runs the user's step with the remedy


def first_that_works(
    ranks: Lockstep, attempts: Iterable[Attempt[What, Result]], works: Callable[[Result], bool] = bool
) -> list[tuple[What, Result]]:
    """Run attempts until one works, and return all that ran, each with its result.

    A generator may build the next attempt from the result of the one before, which has run by then. Call this within
    :meth:`Lockstep.until_all_are_done`, because ranks may have different attempts.
    """
    tried: list[tuple[What, Result]] = []
    for attempt in attempts:
        ranks.go_on()
        result = attempt.run()
        tried.append((attempt.what, result))
        if works(result):
            break
    return tried
