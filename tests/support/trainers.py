"""A quiet Trainer, and a fit from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import registry
from zoo.toy import batches

from support.devices import DEVICE

# Each Trainer reads the metadata of all that is installed, in search of callbacks: half of the time of a tiny fit.
registry.entry_points = functools.cache(registry.entry_points)


def quiet_trainer(**kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": DEVICE,
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(defaults | kwargs))


def fit(
    module: L.LightningModule | Callable[[], L.LightningModule],
    plugin: Any = None,
    data: Any = None,
    seed: int = 0,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.Trainer:
    """Train from a seed; the module is `trainer.lightning_module`."""
    torch.manual_seed(seed)
    if not isinstance(module, L.LightningModule):
        module = module()
    trainer = quiet_trainer(plugins=None if plugin is None else [plugin], **kwargs)
    trainer.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer
