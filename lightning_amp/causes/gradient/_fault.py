"""Where a gradient is lost, and by what, read from the rows of one sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lightning_amp.findings import LOW_DB, TOTAL, GradientFault, GradientFaultKind, GradientRow

_LOST_DB = 3.0  # of one module, while the others are fine
_ROUNDING_DB = -30.0  # the true gradient is itself what rounding left of zero: a bias before a normalisation
_SAME_WAY = 0.99


def find_gradient_fault(rows: Iterable[GradientRow], order: Sequence[str], clipped: str = "") -> GradientFault | None:
    """Read the rows of a sample; `None` if the gradient is near that of fp32.

    Args:
        rows: With that of all gradients.
        order: Their names in the order in which the backward computes them; what is not in it comes last.
        clipped: Who clips scaled gradients; empty if nobody does.

    """
    by_name = {row.name: row for row in rows}
    total = by_name.pop(TOTAL, None)
    if total is None or total.largest == 0:
        return None
    place = {name: i for i, name in enumerate(order)}
    parts = sorted((r for r in by_name.values() if r.largest != 0), key=lambda r: place.get(r.name, len(place)))

    def first(kind: GradientFaultKind, found: list[GradientRow], whole: bool = True) -> GradientFault:
        return GradientFault(kind, found[0] if found else total, total, whole)

    if math.isnan(total.largest):
        return first("nan", [row for row in parts if math.isnan(row.largest)])
    if math.isinf(total.largest):
        return first("infinite", [row for row in parts if math.isinf(row.largest)])
    if clipped and not (total.sqnr_db >= LOW_DB or 0.7 < total.norm_ratio < 1.4):
        return first("length", [row for row in parts if not row.sqnr_db >= LOW_DB])._replace(clipped=clipped)
    if math.isnan(total.sqnr_db):
        return first("overflow", [row for row in parts if math.isnan(row.sqnr_db)])
    low = [row for row in parts if row.sqnr_db < LOW_DB]
    if total.sqnr_db < LOW_DB:
        same_way = sum(row.cosine > _SAME_WAY for row in parts)
        if same_way > 0.8 * len(parts) and not 0.7 < total.norm_ratio < 1.4:
            return first("length", low)
        low = [row for row in low if row.sqnr_db > _ROUNDING_DB] or low
        return first(_kind(low[0] if low else total), low)
    lost = [row for row in low if _ROUNDING_DB < row.sqnr_db < _LOST_DB or _kind(row) == "zero"]
    return first(_kind(lost[0]), lost, whole=False) if lost else None


def _kind(row: GradientRow) -> GradientFaultKind:
    return "zero" if row.precision in ("fp16", "") and row.underflow_fraction > 0.1 else "rounding"
