"""Time several runs in rounds. A machine that becomes busy then slows down all of them, and not only the last one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping


def in_rounds(
    runs: Mapping[str, Callable[[], float]],
    takes_part: Callable[[int], Iterable[str]],
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each run by round; each round reverses the order of the round before.

    Each run is called once before the first round, so that kernels are chosen and memory is allocated. The seconds of
    that call are not returned.

    Args:
        runs: Functions that return the seconds of one run.
        takes_part: Returns the names for the next round, given the number of finished rounds. An empty result ends the
            timing.
        failed: Called with the name and the exception if a first call raises; that run is then left out. Without
            `failed` the exception is raised.

    """
    seconds: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            if failed is None:
                raise
            failed(name, error)
        else:
            seconds[name] = []
    for number in itertools.count():
        names = [name for name in takes_part(number) if name in seconds]
        if not names:
            break
        for name in names if number % 2 else names[::-1]:
            seconds[name].append(runs[name]())
    return seconds
