"""Why a gradient is not that of fp32, and what helps: tried once for each cause of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp.causes.gradient._fault import find_gradient_fault
from lightning_amp.causes.gradient._remedies import GradientRemedies
from lightning_amp.findings import GradientFault, InaccurateDerivative, TriedRemedy
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import RowsBy, Sample

_MOST_CAUSES = 8
"""For which it is tried what helps, in one run."""


@final
class GradientFindings(NamedTuple):
    """What a sample shows.

    Attributes:
        fault: What is wrong with the gradient; `None`: nothing.
        tried: What was tried against it, now or in an earlier sample.
        derivative: The first of the run, inside of its loss, that fp16 does not hold.
        scaled_grad_helps: Whether it was tried on that one, and helped.

    """

    fault: GradientFault | None
    tried: list[TriedRemedy]
    derivative: InaccurateDerivative | None
    scaled_grad_helps: bool


@final
class GradientSearch:
    """Reads the samples of a run. What it tried against a cause it does not try again."""

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
        """Read a sample, and try what may help against what it shows. All ranks must call.

        Args:
            trainer: At the start of the batch.
            module: Is not changed.
            batch: That was sampled.
            batch_idx: Its index.
            by: What a row of the sample is.
            sample: Of the batch.
            recommended_scale: The largest loss scale at which the gradients so far fit into fp16.

        """
        remedies = GradientRemedies(trainer, module, batch, batch_idx, by, sample.rows[-1].scale)
        derivative, helps = None, False
        is_new = not self._knows_derivative and isinstance(trainer.precision_plugin, AmpPrecision)
        if sample.derivatives and is_new:
            self._knows_derivative = True
            derivative, helps = sample.derivatives[0], remedies.scaled_grad_helps()
        fault = find_gradient_fault(sample.rows, sample.order, sample.clipped)
        if fault is not None and fault.cause not in self._tried and len(self._tried) < _MOST_CAUSES:
            self._tried[fault.cause] = remedies.try_all(fault, recommended_scale)
        tried = [] if fault is None else self._tried.get(fault.cause, [])
        return GradientFindings(fault, tried, derivative, helps)
