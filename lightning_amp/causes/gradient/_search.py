"""Find out why a gradient differs from fp32, and try remedies, once for each cause of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp.causes.gradient._remedies import GradientRemedies
from lightning_amp.findings import (
    LOW_DB,
    TOTAL,
    GradientFault,
    GradientFaultKind,
    GradientRow,
    InaccurateDerivative,
    TriedRemedy,
)
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import RowsBy, Sample

_MOST_CAUSES = 8
"""The number of causes in one run for which remedies are tried."""

_LOST_DB = 3.0  # a module below this SQNR is a fault, even if all other modules are fine

_ROUNDING_DB = -30.0  # below this the fp32 gradient is rounding noise, as for a bias before a normalisation
_SAME_WAY = 0.99


@final
class GradientFindings(NamedTuple):
    """The result of a sample."""

    fault: GradientFault | None
    tried: list[TriedRemedy]  # tried against the fault, now or in an earlier sample
    # the first derivative of the run inside of the loss that does not fit into fp16
    derivative: InaccurateDerivative | None
    scaled_grad_helps: bool  # tried with this derivative


@final
class GradientSearch:
    """Reads the samples of a run, and tries remedies once for each cause."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, str, float], list[TriedRemedy]] = {}
        self._knows_derivative = False

    def examine(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        by: RowsBy,
        sample: Sample,
        recommended_scale: float | None,
    ) -> GradientFindings:
        """Read the sample of a batch, and try remedies against its fault. All ranks must call this.

        The trainer must be at the start of the batch. The gradients so far fit into fp16 at `recommended_scale`.
        """
        remedies = GradientRemedies(trainer, module, batch, batch_idx, by, sample.rows[-1].scale)
        derivative, helps = None, False
        is_new = not self._knows_derivative and isinstance(trainer.precision_plugin, AmpPrecision)
        if sample.derivatives and is_new:
            self._knows_derivative = True
            derivative = sample.derivatives[0]
        fault = find_gradient_fault(sample.rows, sample.order, sample.clipped)
        if fault is not None and fault.cause not in self._tried and len(self._tried) < _MOST_CAUSES:
            self._tried[fault.cause] = remedies.try_all(fault, recommended_scale)
        tried = [] if fault is None else self._tried.get(fault.cause, [])
        return GradientFindings(fault, tried, derivative, helps)


def find_gradient_fault(rows: Iterable[GradientRow], order: Sequence[str], clipped: str = "") -> GradientFault | None:
    """Find the fault that the rows of a sample show; return `None` if the gradient is close to fp32.

    `order` has the names of modules in the order of the backward; all other names come last. `clipped` names a function
    that clips scaled gradients.
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
