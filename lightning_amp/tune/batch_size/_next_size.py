"""Choose the batch size to run next from the measurements so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_amp.tune.batch_size._result import Measurement

MOST_RUNS = 10
"""Largest number of runs in one precision. Three are enough if memory is a straight line over the size."""

_ROUND_FROM = 64
_MULTIPLE = 8
_SMALL_GAIN = 1.01
"""After :data:`_ENOUGH_RUNS` runs, a size must be larger by this factor to be worth another one."""
_ENOUGH_RUNS = 3
_APART = 1.25
"""The smallest ratio of two sizes for which a line through them is reliable."""
_MARGIN = 0.01
"""After each size that did not fit, the next guess is lowered by one more such share, as peaks vary between runs."""
_STEP = 4
"""Largest step, as a multiple of the largest size so far, until measurements show that the line is straight."""
_FIRST_STEP = 32
_NOISE = 0.05


def largest_within(points: Sequence[Measurement], limit_gib: float) -> Measurement | None:
    """Return the largest size that was run and is within the limit."""
    return max((p for p in points if p.peak_gib <= limit_gib), key=lambda p: p.batch_size, default=None)


def floor_size(size: float, most: int | None = None) -> int:
    """Round down, from 64 on to a multiple of 8 for tensor cores. This costs an eighth at most.

    The size may be infinite. `most`, the number of rows, is never exceeded and never rounded.
    """
    if most is not None and size >= most:
        return most
    whole = int(size * (1 + 1e-9))
    return whole // _MULTIPLE * _MULTIPLE if whole >= _ROUND_FROM else whole


def next_size(points: Sequence[Measurement], limit_gib: float, most: int | None = None) -> int | None:
    """Return the size to run next; `None` if no larger size can fit, or if not even one row fits.

    Memory over the batch size is a straight line, or bends upwards. It bends because the optimizer's step sets the peak
    of small batches, or because a loss over all pairs of rows grows with their square. A line through two sizes may
    then lead beyond the limit. The line from that size back to a size that fits leads to a size within the limit.

    Args:
        points: One or more measurements.
        limit_gib: The limit.
        most: Number of rows of the data; `None` if it is unknown or endless.

    """
    best = largest_within(points, limit_gib)
    if best is None:
        return _smaller(points, limit_gib)
    if most is not None and best.batch_size >= most:
        return None
    if len(points) == 1:
        guess = floor_size(min(_proportional(best, limit_gib), _FIRST_STEP * best.batch_size), most)
        if guess >= _APART * best.batch_size or guess == most:
            return guess
        return best.batch_size // 2 or 2
    beyond = [p for p in points if p.batch_size > best.batch_size]
    guess = floor_size(_estimate(points, best, limit_gib), most)
    if beyond:
        nearest = min(p.batch_size for p in beyond)
        guess = min(guess, floor_size(nearest - max(1, _MARGIN * nearest * (len(beyond) - 1))))
    needed = best.batch_size * (_SMALL_GAIN if len(points) >= _ENOUGH_RUNS else 1)
    return guess if guess > needed else None


def _estimate(points: Sequence[Measurement], best: Measurement, limit_gib: float) -> float:
    below = sorted((p for p in points if p.batch_size < best.batch_size), key=lambda p: p.batch_size)
    above = min((p for p in points if p.batch_size > best.batch_size), key=lambda p: p.batch_size, default=None)
    onwards = _on_line(below[-1], best, limit_gib) if below else math.inf
    if above is None:
        trusted = math.isfinite(onwards) and _is_straight(below, best)
        return min(onwards, (_FIRST_STEP if trusted else _STEP) * best.batch_size)
    if not math.isfinite(above.peak_gib):
        return min(onwards, (best.batch_size + above.batch_size) / 2)
    back = _on_line(best, above, limit_gib)
    # A curve that bends upwards lies between the two lines, closer to `back`.
    return (2 * back + min(onwards, above.batch_size)) / 3 if below else back


def _is_straight(below: Sequence[Measurement], best: Measurement) -> bool:
    """Return whether the line through two sizes predicted the peak of a third, so that it can be trusted far away.

    It cannot while all peaks are about the same, because then the optimizer's state hides the memory of a row.
    """
    if len(below) < 2:
        return False
    (size, peak, _), (other_size, other_peak, _) = below[-2:]
    if best.peak_gib - peak < 2 * _NOISE * best.peak_gib:
        return False
    expected = peak + (other_peak - peak) / (other_size - size) * (best.batch_size - size)
    return abs(expected - best.peak_gib) <= _NOISE * best.peak_gib


def _smaller(points: Sequence[Measurement], limit_gib: float) -> int | None:
    """Return a size below all sizes so far, if none of them fits; `None` if one row was tried."""
    smallest, *others = sorted(points, key=lambda p: p.batch_size)
    if smallest.batch_size == 1:
        return None
    guess = math.inf
    if others and math.isfinite(others[0].peak_gib):
        guess = _on_line(smallest, others[0], limit_gib)
    elif math.isfinite(smallest.peak_gib):
        guess = _proportional(smallest, limit_gib)
    if math.isinf(guess):
        guess = smallest.batch_size / _STEP
    return max(1, min(floor_size(guess), smallest.batch_size // 2))


def _proportional(point: Measurement, limit_gib: float) -> float:
    return point.batch_size * limit_gib / point.peak_gib if point.peak_gib > 0 else math.inf


def _on_line(one: Measurement, other: Measurement, limit_gib: float) -> float:
    """Return the size at which the line through two points reaches the limit."""
    slope = (other.peak_gib - one.peak_gib) / (other.batch_size - one.batch_size)
    return one.batch_size + (limit_gib - one.peak_gib) / slope if slope > 0 else math.inf
