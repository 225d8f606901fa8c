# pyright: reportMissingImports=false
"""Learning-rate schedules, torch's and other people's; what the rates were in each batch is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors


class Scheduled(Classifier):
    """SGD and a schedule; `config` is the rest of Lightning's dictionary."""

    def __init__(self, make_schedule: Callable[[torch.optim.Optimizer], Any], **config: Any) -> None:
        super().__init__()
        self.make_schedule = make_schedule
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_schedule(optimizer), "interval": "step", **self.config},
        }


def schedules(**settings: Any) -> Any:
    return project("schedules", **settings)


def scheduled(make: Callable[[torch.optim.Optimizer], Any], epochs: int = 2, **config: Any) -> Setup:
    trainer = {"max_epochs": epochs, "gradient_clip_val": 1.0}
    return Setup(Scheduled(make, **config), vectors(24), vectors(16), trainer=trainer)


@schedules(quick=True)
def schedule_one_cycle() -> Setup:
    """OneCycleLR, which also changes the momentum."""
    return scheduled(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20))


@schedules()
def schedule_plateau() -> Setup:
    """ReduceLROnPlateau on the validation loss, patience 0."""
    return scheduled(
        lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5), epochs=4, interval="epoch", monitor="val_loss"
    )


@schedules(quick=True)
def schedule_manual() -> Setup:
    """Manual optimization that steps its schedule itself, in each batch and at the end of the epoch."""

    class Manual(Scheduled):
        def __init__(self) -> None:
            super().__init__(lambda o: lrs.ExponentialLR(o, 0.9))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
            self.log("train_loss", loss)

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step()

    return Setup(Manual(), vectors(24), vectors(16), trainer={"max_epochs": 2})
