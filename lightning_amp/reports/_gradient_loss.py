"""Where a gradient is lost, read from the rows of one sample, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from typing_extensions import final, override

from lightning_amp._text import exact, percent, rounded
from lightning_amp.reports._gradient_table import TOTAL, GradientRow

LOW_DB = 10.0
"""Below it the noise is a third of the gradient. Deep healthy networks have 20 in bf16, fp8 has 18."""

_LOST_DB = 3.0  # of one module, while the others are fine
_ROUNDING_DB = -30.0  # the true gradient is itself what rounding left of zero: a bias before a normalisation
_SAME_WAY = 0.99

Kind = Literal["nan", "infinite", "overflow", "zero", "length", "rounding"]


@final
class GradientLoss(NamedTuple):
    """What is wrong with a gradient.

    Attributes:
        kind: `"nan"` and `"infinite"`: in fp32, too. `"overflow"`: in mixed precision alone. `"zero"`: it is too small
            for fp16. `"length"`: it points the same way. `"rounding"`: it does not, and all of it is in range.
        row: The first in the order of the backward.
        total: All gradients together.
        whole: Whether all of them together are far off, or only some modules' own.
        clipped: Who clips gradients that are still multiplied with the loss scale, and where; empty if nobody does.

    """

    kind: Kind
    row: GradientRow
    total: GradientRow
    whole: bool
    clipped: str = ""

    @property
    def cause(self) -> tuple[str, str, float]:
        """Return what two samples have in common that the same setting helps."""
        return self.kind, self.row.name, self.total.scale if self.kind in ("zero", "overflow") else 1.0


@final
class Trial(NamedTuple):
    """Another setting with which the same batch was run.

    Attributes:
        setting: As it is written in code.
        sqnr_db: Of what was lost, or of all gradients together where that is lower; NaN if it overflowed.

    """

    setting: str
    sqnr_db: float

    @property
    def works(self) -> bool:
        """Return whether the gradient is near that of fp32 again."""
        return self.sqnr_db >= LOW_DB

    @override
    def __str__(self) -> str:
        return f"{self.setting} (tried: {decibels(self.sqnr_db)})"


def find_gradient_loss(rows: Iterable[GradientRow], order: Sequence[str], clipped: str = "") -> GradientLoss | None:
    """Read the rows of a sample; `None` if the gradient is near that of fp32.

    Args:
        rows: With that of all gradients.
        order: Their names in the order in which the backward computes them; what is not in it comes last.
        clipped: Who clips scaled gradients.

    """
    by_name = {row.name: row for row in rows}
    total = by_name.pop(TOTAL, None)
    if total is None or total.largest == 0:
        return None
    place = {name: i for i, name in enumerate(order)}
    parts = sorted((r for r in by_name.values() if r.largest != 0), key=lambda r: place.get(r.name, len(place)))

    def first(kind: Kind, found: list[GradientRow], whole: bool = True) -> GradientLoss:
        return GradientLoss(kind, found[0] if found else total, total, whole)

    if math.isnan(total.largest):
        return first("nan", [row for row in parts if math.isnan(row.largest)])
    if math.isinf(total.largest):
        return first("infinite", [row for row in parts if math.isinf(row.largest)])
    if clipped and not (total.sqnr_db >= LOW_DB or 0.7 < total.length < 1.4):
        return first("length", [row for row in parts if not row.sqnr_db >= LOW_DB])._replace(clipped=clipped)
    if math.isnan(total.sqnr_db):
        return first("overflow", [row for row in parts if math.isnan(row.sqnr_db)])
    low = [row for row in parts if row.sqnr_db < LOW_DB]
    if total.sqnr_db < LOW_DB:
        same_way = sum(row.cosine > _SAME_WAY for row in parts)
        if same_way > 0.8 * len(parts) and not 0.7 < total.length < 1.4:
            return first("length", low)
        low = [row for row in low if row.sqnr_db > _ROUNDING_DB] or low
        return first(_kind(low[0] if low else total), low)
    lost = [row for row in low if _ROUNDING_DB < row.sqnr_db < _LOST_DB or _kind(row) == "zero"]
    return first(_kind(lost[0]), lost, whole=False) if lost else None


def _kind(row: GradientRow) -> Kind:
    return "zero" if row.precision in ("fp16", "") and row.underflow_fraction > 0.1 else "rounding"


def decibels(sqnr_db: float) -> str:
    """Write an SQNR."""
    if math.isnan(sqnr_db):
        return "overflows"
    return "equal" if math.isinf(sqnr_db) else f"{sqnr_db:.1f} dB"


def describe_loss(found: GradientLoss, trials: Sequence[Trial], *, faded: float = 1.0) -> str:
    """Say what is wrong, where first, and what helps, in sentences.

    Args:
        found: What.
        trials: What was tried, in order.
        faded: Largest gradient of this sample, in units of the largest so far.

    """
    row = found.row
    name = "the gradient" if row.name == TOTAL else f"that of `{row.name}`"
    if found.kind in ("nan", "infinite"):
        what = "NaN" if found.kind == "nan" else "infinite"
        first = "" if row.name == TOTAL else f", first (in the order of the backward) {name}"
        return f"The gradient is {what} in fp32, too{first}: no precision and no loss scale helps."
    if found.kind == "length":
        text = _wrong_length(found)
    elif found.kind == "overflow":
        at = f" at a loss scale of {exact(row.scale)}" if row.precision in ("fp16", "") else ""
        text = f"The gradient overflows in {row.precision or 'fp16'}{at}, first {name}; in fp32 it is finite."
    else:
        text = _noise(found, name, faded)
    works = [trial for trial in trials if trial.works]
    if works:
        return f"{text} What helps: {' or '.join(map(str, works))}."
    if trials:
        text += f" Tried, each without success: {', '.join(trial.setting for trial in trials)}."
    return f"{text} `compare_precisions` tells whether that costs quality." if found.kind == "rounding" else text


def _noise(found: GradientLoss, name: str, faded: float) -> str:
    row = found.row
    numbers = f"SQNR {decibels(row.sqnr_db)}, cosine {row.cosine:.4f}"
    where = f"The gradient is not that of fp32, first {name} ({numbers})"
    if not found.whole:
        where = f"The gradient of `{row.name}` is not that of fp32 ({numbers})"
    if found.kind == "zero":
        return f"{where}: {percent(row.underflow_fraction)} of it becomes zero at a loss scale of {exact(row.scale)}."
    text = f"{where}: it is in range, but what {row.precision or 'fp16'} rounds away is as large as the gradient."
    if found.whole and faded < 0.01:
        text += f" It has become small, {percent(faded)} of the largest so far: late in a training that is usual."
    return text


def _wrong_length(found: GradientLoss) -> str:
    total = found.total
    times, scale = f"{rounded(total.length)} times the length", exact(total.scale)
    if found.clipped:
        has = "is not that of fp32" if math.isnan(total.length) else f"has {times} of that of fp32"
        return f"The gradient {has}: {found.clipped} clips it while it is multiplied with the loss scale, {scale}."
    text = f"The gradient points where that of fp32 does (cosine {total.cosine:.4f}) and has {times}"
    if abs(total.length * total.scale - 1) < 0.02 and total.scale != 1:
        return f"{text}, one by the loss scale: `training_step` divides by it, and so does the plugin."
    return (
        f"{text}. Where `training_step` changes gradients by itself they are still multiplied with the loss scale,"
        f" {scale}: `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it makes them true ones."
    )
