"""A step that failed, packed for `lightning_amp.tracing.replay`."""

from __future__ import annotations

import io
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_amp.shadow._batch_window import KeptBatch
from lightning_amp.tracing import make_bundle


def packed_step(
    trainer: Trainer, module: LightningModule, step: KeptBatch, scale: float, report: dict[str, Any]
) -> bytes:
    """Pack what rank 0 does not have of the bundle for `lightning_amp.tracing.replay`: all but the parameters."""
    parameters = dict(module.named_parameters())
    bundle = make_bundle(
        module_state={name: value for name, value in module.state_dict().items() if name not in parameters},
        batch=step.batch,
        batch_idx=step.batch_idx,
        random_state=step.random_state,
        scale=scale,
        loss_divisor=float(trainer.accumulate_grad_batches) if module.automatic_optimization else 1.0,
        report=report,
    )
    file = io.BytesIO()
    torch.save(bundle, file)
    return file.getvalue()


def unpacked_step(packed: bytes, module: LightningModule) -> dict[str, Any]:
    """Return the whole bundle, with the parameters of this rank, which are those of all."""
    bundle = torch.load(io.BytesIO(packed), weights_only=False)
    state = {name: value for name, value in module.state_dict().items() if name not in bundle["module_state"]}
    state = {name: value.detach().cpu() for name, value in state.items()}
    return {**bundle, "module_state": {**state, **bundle["module_state"]}}
