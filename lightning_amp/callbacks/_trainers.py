"""What every callback asks of its Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def require_lightning_trainer(callback: Callback, trainer: Any) -> None:
    """Refuse the Trainer of the other package.

    Raises:
        TypeError: If `trainer` is a `pytorch_lightning.Trainer`.

    """
    if not isinstance(trainer, Trainer) and type(trainer).__module__.startswith("pytorch_lightning"):
        name = type(callback).__name__
        raise TypeError(
            f"`{name}` works with `lightning.pytorch`, got a `{type(trainer).__module__}.{type(trainer).__name__}`. The"
            " two packages do not mix: use `import lightning as L` and `L.Trainer(...)`, with a module derived from"
            " `L.LightningModule`."
        )


def why_not_twice(trainer: Trainer, module: LightningModule, step: str) -> str | None:
    """Why `training_step`, `validation_step` or `test_step` cannot be run a second time here; `None` if it can."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy) or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return f"it works on one device and in DDP, and the strategy is `{type(strategy).__name__}`"
    if strategy.root_device.type == "xla":
        return "the random generators of XLA devices cannot be paired"
    if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
        return f"a `{step}` that takes a `dataloader_iter` consumes its batches, so they cannot be run twice"
    return None
