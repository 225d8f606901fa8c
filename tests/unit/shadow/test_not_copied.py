"""A step of a copy must not use objects that cannot be copied. Hooks that cannot be copied are shared."""

from __future__ import annotations

import functools
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from support import Toy, assert_same, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.copies import Module, copied

from lightning_amp import AmpPrecision, GradientMonitor, MetricComparison, OverflowLocator
from lightning_amp.shadow._module_copy import NotCopiedError


class Recorder:
    """Writes to a file, and changes what the layer returns."""

    def __init__(self, file: Any) -> None:
        self.file, self.lock = file, threading.Lock()

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        with self.lock:
            self.file.write("x")
        return output + 1


@pytest.mark.parametrize("kind", ["object", "bound method", "partial", "closure"])
def test_hooks_that_cannot_be_copied_are_shared(kind: str, tmp_path: Any) -> None:
    module: Any = Module().eval()
    with (tmp_path / "log.txt").open("w") as file:
        module.recorder = recorder = Recorder(file)  # an attribute of the module, too: a step may not use it
        hooks: dict[str, Any] = {
            "object": recorder,
            "bound method": recorder.__call__,
            "partial": functools.partial(recorder.__call__),
            "closure": lambda *args: recorder(*args) * 1,
        }
        module.net[0].register_forward_hook(hooks[kind])
        copy: Any = copied(module)
        x = torch.randn(3, 2)
        assert torch.equal(copy.net(x), module.net(x))
        with pytest.raises(NotCopiedError, match=r"`Module\.recorder` cannot be copied"):
            copy.recorder.file.write("y")
    assert (tmp_path / "log.txt").read_text() == "xx"


def test_hooks_that_draw_from_a_generator_share_it() -> None:
    module: Any = Module().eval()
    noise = (torch.full((2,), float(i)) for i in range(10))
    module.net[0].register_forward_hook(lambda _module, _inputs, output: output + next(noise))
    copied(module).net(torch.zeros(1, 2))
    assert next(noise)[0] == 1.0


@pytest.mark.needs("profiler")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The PyTorch ?Profiler")
def test_the_pytorch_profiler_switches_no_callback_off() -> None:
    comparison, monitor, locator = MetricComparison(), GradientMonitor(1), OverflowLocator()

    class Inf(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).float().sum() * (torch.inf if batch_idx == 1 else 1.0)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch).sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, profiler=PyTorchProfiler(export_to_chrome=False),
        plugins=AmpPrecision("fp16", scaler=64.0), callbacks=[comparison, monitor, locator],
    )  # fmt: skip
    loader = DataLoader(torch.randn(8, 2), batch_size=4)
    trainer.fit(Inf(), loader, loader)
    assert [row.metric for row in comparison.table] == ["val_loss"]
    assert {row.name for row in monitor.table} == {"net.0", "net.1", "(all)"}
    assert [(report.cause, report.note) for report in locator.reports] == [("loss", "")]


class StepsItsSchedule(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.held.step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        self.held: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer


class StepsItsOwnOptimizer(StepsItsSchedule):
    """Steps another optimizer with the gradients of the batch before."""

    def configure_optimizers(self) -> Any:
        self.held = torch.optim.SGD(self.net[-1].parameters(), 0.01)
        return super(StepsItsSchedule, self).configure_optimizers()


class EditsThroughItsSchedule(StepsItsSchedule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.held.optimizer.param_groups[0]["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


class CallsAnotherMethod(Toy):
    """As SAM does, whose `first_step` moves the weights."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.trainer.optimizers[0].move()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        class Moves(torch.optim.SGD):
            @torch.no_grad()
            def move(self) -> None:
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)

        return Moves(self.parameters(), 0.1)


class AddsAGroup(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx == 3 and len(optimizer.param_groups) < 2:
            optimizer.add_param_group({"params": [*self.net[-1].parameters()], "lr": 0.1})
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*not be run a second time .*(held|optimizers..). cannot be copied .its methods")
@pytest.mark.parametrize(
    "make", [StepsItsSchedule, EditsThroughItsSchedule, StepsItsOwnOptimizer, CallsAnotherMethod, AddsAGroup]
)
def test_a_second_run_moves_nothing_through_optimizers_and_schedules(make: Any) -> None:
    callbacks: list[Any] = [[], [GradientMonitor(1)]]
    trainers = [fit(make, AmpPrecision("bf16"), callbacks=each) for each in callbacks]
    assert_same(*(trainer.lightning_module for trainer in trainers))
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in trainers]
    assert rates[0] == rates[1]
