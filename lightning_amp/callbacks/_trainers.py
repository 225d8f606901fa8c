"""What every callback asks of its Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer


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
