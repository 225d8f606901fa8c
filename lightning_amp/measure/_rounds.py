"""Time several runs in rounds: a machine that becomes busy slows down all of them, not the last one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping


def in_rounds(
    runs: Mapping[str, Callable[[], float]],
    takes_part: Callable[[int], Iterable[str]],
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each run by round; each round has the opposite order of the one before.

    All run once before the first round, which chooses kernels and allocates memory; those seconds are not returned.

    Args:
        runs: Each runs once and returns its seconds.
        takes_part: Names the runs of the next round, given how many rounds there were. No name ends it.
        failed: Is told of a run that raises before the first round, which then takes part in none. Without it the
            exception comes out.

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
