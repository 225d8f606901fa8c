"""The callbacks that Lightning ships; what each of them did is compared, not only that it ran."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.tuner import Tuner
from torch import nn

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors

EPOCHS: dict[str, Any] = {"max_epochs": 3}


def callbacks(**settings: Any) -> Any:
    return project("callbacks", **settings)


def with_callbacks(*used: L.Callback, observe: Any = None, module: Any = None, **trainer: Any) -> Setup:
    trainer = {"callbacks": list(used), **trainer}
    return Setup(module or Classifier(), vectors(24), vectors(16), trainer=trainer, observe=observe)


@callbacks(quick=True)
def callback_checkpoint_and_resume() -> Setup:
    """Train, save, and continue from the file in a second Trainer, as if the run had not stopped."""
    save = cb.ModelCheckpoint("checkpoints", save_last=True)

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.fit(module, vectors(24), vectors(16))
        state = torch.load("checkpoints/last.ckpt", weights_only=False)
        assert state["global_step"] == 3
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, vectors(24), vectors(16), ckpt_path="checkpoints/last.ckpt")

    return Setup(
        Classifier(),
        trainer={"callbacks": [save], "enable_checkpointing": True},
        script=script,
        observe=lambda t, m: {"steps": t.global_step, "epochs": t.current_epoch},
    )


@callbacks(quick=True, needs=["lightning.pytorch.callbacks.EMAWeightAveraging"])
def callback_ema() -> Setup:
    """EMAWeightAveraging per step; validation uses the average, and the module holds it at the end."""
    return with_callbacks(cb.EMAWeightAveraging(decay=0.5), **EPOCHS)


@callbacks()
def callback_swa() -> Setup:
    """StochasticWeightAveraging from the second epoch, with its pass for batch normalisation at the end."""
    return with_callbacks(cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), **EPOCHS)


class Tuned(Classifier):
    """With the attribute that the finder of learning rates writes."""

    def __init__(self, lr: float = 1e-3, batch_size: int = 4) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=self.lr))
        self.lr, self.batch_size = lr, batch_size

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 16, generator=generator)
        data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@callbacks()
def tuner_lr_find() -> Setup:
    """`Tuner.lr_find`, then a fit with the rate that it found; all tried rates are compared."""

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        found = Tuner(trainer).lr_find(module, num_training=20, min_lr=1e-5, max_lr=1.0)
        module.tried = len(found.results["lr"])
        trainer.fit(module)

    return Setup(Tuned(), script=script, observe=lambda t, m: {"tried": m.tried, "steps": t.global_step})


@callbacks()
def fit_validate_test_fit() -> Setup:
    """Sanity check, fit, validate, test, predict, and fit again, on one Trainer."""

    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def script(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.fit(module, vectors(24), vectors(16))
        trainer.validate(module, vectors(16), verbose=False)
        trainer.test(module, vectors(16), verbose=False)
        trainer.predict(module, vectors(16))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, vectors(24), vectors(16))

    return Setup(Tested(), script=script, observe=lambda t, m: {"steps": t.global_step})
