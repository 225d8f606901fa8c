"""Count the matrix products of a training step by dtype."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_amp.measure import MatmulFlops
from lightning_amp.shadow._training_pass import TrainingPass


def matmul_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> dict[str, float]:
    """Return the share of each dtype in the FLOPs of matrix products, from 0 to 1, the largest first; empty without.

    It runs the step once more, forward and backward, on a copy of the module; compiled code runs eagerly. Convolutions
    and attention count as matrix products.
    """
    with closing(TrainingPass(trainer, module)) as again, MatmulFlops() as flops:
        again.run(batch, batch_idx, context=trainer.precision_plugin.forward_context())
    total = sum(flops.by_dtype.values())
    return {name: count / total for name, count in flops.by_dtype.most_common() if count}
