"""What may help against a fault, tried in order until something does."""

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
    """Something that may help.

    Attributes:
        what: Its name in a report: a setting as it stands in code, or a `Remedy`.
        run: Runs the user's step with it, and returns what came of it.

    """

    what: What
    run: Callable[[], Result]


def first_that_works(
    ranks: Lockstep, attempts: Iterable[Attempt[What, Result]], works: Callable[[Result], bool] = bool
) -> list[tuple[What, Result]]:
    """Run attempts until one works, and return all that ran, each with its result.

    The next attempt is asked for after the one before has run, so that a generator may make it of what that showed.
    To be called within :meth:`Lockstep.until_all_are_done`: ranks may have different attempts.
    """
    tried: list[tuple[What, Result]] = []
    for attempt in attempts:
        ranks.go_on()
        result = attempt.run()
        tried.append((attempt.what, result))
        if works(result):
            break
    return tried
