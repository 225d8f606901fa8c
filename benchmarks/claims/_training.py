"""Train the small GPT by `Trainer.fit` in one of several ways. A run that several claims need is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import final

from benchmarks.claims._claim import Setting
from benchmarks.claims._models import GPT, text, text_loss
from lightning_amp import AmpPrecision

STEPS = 80
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16, not scaled": {"precision": "fp16", "scaler": 1.0},
    "fp32 weights from bf16": {"precision": "bf16", "upcast_parameters": True},
}


@final
class Trained(NamedTuple):
    """A trained net, and its validation loss in fp32 and in the precision of its training."""

    net: GPT
    val_loss: float
    val_loss_as_trained: float


@final
class Task(L.LightningModule):
    """Trains a net with AdamW and a learning rate that falls to zero."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor] = text_loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def num_steps(setting: Setting) -> int:
    """Return the steps of a run."""
    return 4 if setting.tiny else STEPS


def batches(num: int, seed: int) -> Sequence[Tensor]:
    """Return the batches of a run."""
    return text(8 * num, 25, seed).split(8)


def fit(task: L.LightningModule, data: Sequence[Tensor], setting: Setting, **kwargs: Any) -> None:
    """Train on the batches once, without a logger and checkpoints."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    where = {"accelerator": setting.device_type, "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    loader: Any = DataLoader(list(data), batch_size=None)  # pyright: ignore[reportArgumentType]
    L.Trainer(**quiet, **where, **kwargs).fit(task, loader)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a net with the initial weights of a seed."""
    torch.manual_seed(seed)
    return make()


@cache
def trained(setting: Setting, how: str, seed: int) -> Trained:
    """Train with a seed; all ways of one seed share initial weights and batches.

    Args:
        setting: The device and the size.
        how: A key of `_ARGUMENTS`, or `"bf16 weights"`.
        seed: The seed.
    """
    torch.manual_seed(seed)
    net = GPT()
    if how in ("bf16 weights", "fp32 weights from bf16"):
        net.to(torch.bfloat16)
    plugin = {"precision": "bf16-true"} if how == "bf16 weights" else {"plugins": [AmpPrecision(**_ARGUMENTS[how])]}
    fit(Task(net), batches(num_steps(setting), seed), setting, **plugin)
    net.to(setting.device)
    half = torch.float16 if "fp16" in how else torch.bfloat16
    as_trained = val_loss(net, setting, half if how in ("bf16", "fp16") else None)
    return Trained(net.float(), val_loss(net.float(), setting), as_trained)


@torch.no_grad()
def val_loss(net: nn.Module, setting: Setting, dtype: torch.dtype | None = None) -> float:
    """Return the loss on text that no run trains on, under autocast if `dtype` is given."""
    tokens = text(8 if setting.tiny else 256, 25, seed=-1).to(setting.device)
    with torch.autocast(setting.device_type, dtype or torch.bfloat16, enabled=dtype is not None):
        return float(text_loss(net, tokens))


def differences(setting: Setting, how: str, reference: str = "fp32") -> list[float]:
    """Return, by seed, the difference of the final validation loss to that of a reference, relative to it."""
    pairs = [(trained(setting, how, s).val_loss, trained(setting, reference, s).val_loss) for s in setting.seeds]
    return [(found - wanted) / wanted for found, wanted in pairs]
