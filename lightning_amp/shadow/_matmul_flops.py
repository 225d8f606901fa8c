"""In which dtype a training step computes its matrix products."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_amp.casting import MatmulFlops
from lightning_amp.shadow._training_pass import TrainingPass


def matmul_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> dict[str, float]:
    """Return the share of the FLOPs of matrix products by dtype, from 0 to 1, the largest first; empty without any.

    The step runs once more, forward and backward, on a copy of the module; what `torch.compile` compiled runs eagerly.
    Convolutions and attention are matrix products, too.
    """
    again = TrainingPass(trainer, module)
    try:
        with MatmulFlops() as flops:
            again.run(batch, batch_idx, context=trainer.precision_plugin.forward_context())
    finally:
        again.close()
    total = sum(flops.by_dtype.values())
    return {name: count / total for name, count in flops.by_dtype.most_common() if count}
