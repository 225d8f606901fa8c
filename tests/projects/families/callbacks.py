"""The callbacks that Lightning ships; what each of them did is compared, not only that it ran."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import callbacks as cb
from torch import nn

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors

EPOCHS: dict[str, Any] = {"max_epochs": 3}


def callbacks(**settings: Any) -> Any:
    return project("callbacks", **settings)


def with_callbacks(*used: L.Callback, observe: Any = None, module: Any = None, **trainer: Any) -> Setup:
    trainer = {"callbacks": list(used), **trainer}
    return Setup(module or Classifier(), vectors(24), vectors(16), trainer=trainer, observe=observe)


@callbacks(quick=True, needs=["lightning.pytorch.callbacks.EMAWeightAveraging"])
def callback_ema() -> Setup:
    """EMAWeightAveraging per step; validation uses the average, and the module holds it at the end."""
    return with_callbacks(cb.EMAWeightAveraging(decay=0.5), **EPOCHS)


@callbacks()
def callback_swa() -> Setup:
    """StochasticWeightAveraging from the second epoch, with its pass for batch normalisation at the end."""
    return with_callbacks(cb.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), **EPOCHS)


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
