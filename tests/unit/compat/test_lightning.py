"""Private names of Lightning still do what we need of them. Tests that need a Trainer are in `tests/unit/shadow`."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.compile import from_compiled
from support import Toy, batches, quiet_trainer
from torchmetrics import MeanMetric

from lightning_amp._compat import _lightning


def test_the_optimizer_of_the_user() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    assert _lightning.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert _lightning.unwrap_optimizer(optimizer) is optimizer


def test_attributes_of_a_compiled_module() -> None:
    module = Toy()
    plain = module.training_step
    compiled = from_compiled(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    assert vars(compiled)["training_step"] is not plain
    state = _lightning.uncompiled_state(vars(compiled))
    assert state["training_step"] == plain
    assert state["_compiler_ctx"] is None
    assert _lightning.uncompiled_state(state) is state


def test_names_of_metrics_are_looked_up_again() -> None:
    class Model(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.metric(1.0)
            self.log("metric", self.metric)
            assert list(self._metric_attributes) == [id(self.metric)]
            _lightning.forget_metric_names(self)
            self.log("again", self.metric)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Model(), batches())
    assert _lightning.logging_step(trainer) == trainer.global_step > 0


def test_a_plain_process_writes_files() -> None:
    assert _lightning.is_rank_zero()
