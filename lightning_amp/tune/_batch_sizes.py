"""The results of `find_batch_size`, the choice of the next size to run, and the suggested learning rate."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from typing_extensions import final, override

from lightning_amp._files import write_json
from lightning_amp._plain_data import Table, null, plain
from lightning_amp._text import listed, memory, rounded


@final
class Measurement(NamedTuple):
    """One run: its batch size, its peak memory (infinite if memory ran out), and its speed (NaN if unknown)."""

    batch_size: int
    peak_gib: float
    samples_per_s: float


@final
@dataclass(frozen=True)
class BatchSizeResult:
    """The largest batch that fits in one precision. A run with this batch size was within the limit.

    Attributes:
        batch_size: Rows of a batch on each device; 0 if `error` says why there is none.
        peak_gib: The most memory that its run held at once, in GiB; NaN with an `error`.
        samples_per_s: Speed of steady steps of that run, with data loading, on all devices together; NaN if unknown.
        lr: A learning rate to try, scaled from the module's own; `None` if `message` says why there is none.
        message: The result in words, its limit (memory, or the number of rows), and the origin of `lr`.
        measured: All runs, by batch size.
        error: The reason if there is no batch size: the module's own error, or a limit below the smallest batch.

    """

    batch_size: int
    peak_gib: float
    samples_per_s: float
    lr: float | None
    message: str
    measured: tuple[Measurement, ...] = ()
    error: str | None = None


@final
class BatchSizes(dict[str, BatchSizeResult]):
    """Results by label, in the order of `precisions`. Prints as Markdown."""

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Write a table, and under it a paragraph for each precision."""
        header = ["precision", "batch size", "peak memory", "samples/s", "learning rate to try"]
        rows = [
            [
                label,
                f"{found.batch_size:,}" if found.error is None else "none",
                memory(found.peak_gib * 2**30) if found.error is None else "",
                rounded(found.samples_per_s) if math.isfinite(found.samples_per_s) else "",
                "" if found.lr is None else f"{found.lr:g}",
            ]
            for label, found in self.items()
        ]
        messages = [f"**{label}**: {found.message}" for label, found in self.items()]
        return "\n\n".join([str(Table(header, rows, ["---", *["--:"] * 4])), *messages]) + "\n"

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all results as JSON to a path or a URL. The file is replaced at once or not at all."""
        data = {
            label: {**asdict(found), "measured": [point._asdict() for point in found.measured]}
            for label, found in self.items()
        }
        write_json(path, plain(data, null))


# -- the next size -----------------------------------------------------------------------------------------------------

MOST_RUNS = 10
"""Largest number of runs in one precision. Three are enough if memory is a straight line over the size."""

_SMALL_GAIN = 1.02
"""A size must be larger by this factor to be worth another run."""
_RISES = 1.03
"""Two peaks must differ by this factor before the line through them is trusted far away.

The optimizer's step hides the memory of a few rows.
"""
_FARTHEST, _FAR = 32, 4
"""Largest step, as a multiple of the largest size that fits: along a trusted line, and otherwise."""


def largest_within(points: Sequence[Measurement], limit_gib: float) -> Measurement | None:
    """Return the largest size that was run and is within the limit."""
    return max((p for p in points if p.peak_gib <= limit_gib), default=None)


def next_size(points: Sequence[Measurement], limit_gib: float, most: float = math.inf) -> int | None:
    """Return the size to run next; `None` if no larger size can fit, or if not even one row fits.

    The size doubles once. A line through two peaks then leads to the limit. Where memory bends upwards, that size does
    not fit; the next one lies on the line between the neighbours of the limit, or in the middle between them.

    Args:
        points: One or more measurements.
        limit_gib: The limit.
        most: Number of rows of the data; infinite if it is unknown or endless.

    """
    fitting = sorted(point for point in points if point.peak_gib <= limit_gib)
    beyond = sorted(point for point in points if point.peak_gib > limit_gib)
    if not fitting:
        smallest, other = beyond[0], beyond[1] if len(beyond) > 1 else Measurement(0, 0.0, 0.0)
        guess = min(smallest.batch_size // 2, _floor(_on_line(smallest, other, limit_gib)))
        return max(1, guess) if smallest.batch_size > 1 else None
    best = fitting[-1]
    if beyond:
        above = beyond[0]
        middle = (best.batch_size + above.batch_size) / 2
        guess = min(_on_line(best, above, limit_gib), above.batch_size - 1) if math.isfinite(above.peak_gib) else middle
    elif len(fitting) == 1:
        guess = 2.0 * best.batch_size
    else:
        is_trusted = best.peak_gib >= _RISES * fitting[-2].peak_gib
        farthest = (_FARTHEST if is_trusted else _FAR) * best.batch_size
        guess = min(_on_line(fitting[-2], best, limit_gib), farthest)
    size = int(most) if guess >= most else _floor(guess)
    return size if size > best.batch_size * (_SMALL_GAIN if len(points) > 1 else 1) else None


def _on_line(one: Measurement, other: Measurement, limit_gib: float) -> float:
    """Return the size at which the line through two points reaches the limit; infinite if the line does not rise."""
    slope = (other.peak_gib - one.peak_gib) / (other.batch_size - one.batch_size)
    return one.batch_size + (limit_gib - one.peak_gib) / slope if slope > 0 and math.isfinite(slope) else math.inf


def _floor(size: float) -> int:
    """Round down, from 64 on to a multiple of 8 for tensor cores. This costs an eighth at most."""
    whole = int(min(size * (1 + 1e-9), 2**40))
    return whole // 8 * 8 if whole >= 64 else whole


# -- the learning rate -------------------------------------------------------------------------------------------------

_RULES = {
    "square root": ("Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "LAMB", "Lamb"),
    "linear": ("SGD", "LARS"),
}


def suggested_rate(used: Sequence[Sequence[Any]], from_size: int, to_size: int) -> tuple[float | None, str]:
    """Scale a learning rate to another batch size: linearly for SGD, by the square root for Adam and its variants.

    Sources: `Goyal et al. 2017 <https://arxiv.org/abs/1706.02677>`_ for SGD, `Malladi et al. 2022
    <https://arxiv.org/abs/2205.10287>`_ for adaptive ones. Both are rules of thumb, and fail for batches so large that
    their gradients have little noise.

    Args:
        used: The optimizer and the learning rate of each parameter group.
        from_size: The batch size for which the rate was chosen.
        to_size: The other batch size.

    Returns:
        The rate, or `None` if there is no single one, and a sentence about its origin or absence.

    """
    pairs = list(dict.fromkeys(map(tuple, used)))
    if len(pairs) != 1:
        return None, f"No learning rate is suggested: the module has {len(pairs) or 'no'} different learning rates."
    ((optimizer, rate),) = pairs
    rule = next((rule for rule, names in _RULES.items() if any(name in optimizer for name in names)), None)
    if rule is None:
        known = listed([name for names in _RULES.values() for name in names[:1]])
        return None, f"No learning rate is suggested: there are rules for {known} and their kin, not for {optimizer}."
    ratio = to_size / from_size
    found = float(f"{rate * (ratio if rule == 'linear' else math.sqrt(ratio)):.3g}") if ratio != 1 else rate
    origin = f"scaled from {rate:g} at batch size {from_size:,}, {rule} rule for {optimizer}"
    return found, f"Learning rate to try: {found:g} ({origin}); a starting point only."
