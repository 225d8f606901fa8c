"""Make a quiet Trainer, and run a fit from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import registry
from zoo.toy import assert_same, batches

from support.devices import DEVICE

# Each Trainer searches the metadata of all installed packages for callbacks, which is half of the time of a tiny fit.
registry.entry_points = functools.cache(registry.entry_points)


QUIET: dict[str, Any] = {
    "accelerator": DEVICE,
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def quiet_trainer(**kwargs: Any) -> L.Trainer:
    return L.Trainer(**(QUIET | kwargs))


def fit(
    module: L.LightningModule | Callable[[], L.LightningModule],
    plugin: Any = None,
    data: Any = None,
    seed: int = 0,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.Trainer:
    """Train from a seed. The module is `trainer.lightning_module`."""
    torch.manual_seed(seed)
    if not isinstance(module, L.LightningModule):
        module = module()
    trainer = quiet_trainer(plugins=None if plugin is None else [plugin], **kwargs)
    trainer.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def assert_as_fp32(
    make: Callable[[], L.LightningModule], plugin: Any, data: Any = None, without: Any = None, **kwargs: Any
) -> tuple[L.Trainer, L.Trainer]:
    """Train with a plugin and without one, and compare all bits. `without`: batches of the run without the plugin.

    `callbacks` go to the run with the plugin, and `tolerance` to the comparison.
    """
    callbacks, tolerance = kwargs.pop("callbacks", None), kwargs.pop("tolerance", {})
    trainer = fit(make, plugin, data, callbacks=callbacks, **kwargs)
    reference = fit(make, None, data if without is None else without, **kwargs)
    assert_same(trainer, reference, **tolerance)
    return trainer, reference


def evaluate(run: str, module: L.LightningModule, data: Any, **kwargs: Any) -> tuple[L.Trainer, Any]:
    """Run "validate", "test" or "predict" quietly. Return the Trainer and its result."""
    trainer = quiet_trainer(**kwargs)
    return trainer, getattr(trainer, run)(module, data, **({} if run == "predict" else {"verbose": False}))
