"""A module loaded in half precision trains like one loaded in float32 from the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from support import FEATURES, Poison, Toy, assert_same, batches, fit, weights
from support.averages import EMAWeightAveraging, needs_averages
from support.promises import Plugins, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
EMA = functools.partial(EMAWeightAveraging, decay=0.9)


class Tied(nn.Module):
    """One weight under two names, a normalisation with and one without weights, and a cast to the weight's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(FEATURES)
        self.plain = nn.Sequential(nn.Linear(FEATURES, 1), nn.BatchNorm1d(1, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.inner(x.to(self.inner.weight.dtype))))
        return self.plain(self.outer(x))


class Loaded(Toy):
    """A module made in float32, rounded to `dtype`, and kept there or converted back; its parameter group is made at
    once.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, half: bool, optimizer: Any = adamw) -> None:
        torch.manual_seed(0)
        super().__init__(optimizer, Tied())
        self.to(dtype)
        if not half:
            self.float()
        self.group = [*self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch.to(self.dtype))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.group)


def plugin(half: bool, precision: str = "bf16") -> AmpPrecision:
    return AmpPrecision(precision, upcast_parameters=half)


@needs_averages
@pytest.mark.needs("parameters that stay")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_as_one_loaded_in_float32(precision: str, dtype: torch.dtype) -> None:
    """Compare parameters, buffers, optimizer state and average, with a skipped step."""
    runs: list[L.Trainer] = []
    for half in (True, False):
        callbacks = [EMA(), Poison(gradient=[2])]
        runs.append(fit(Loaded(dtype, half=half), plugin(half, precision), callbacks=callbacks))
    assert_same(*runs)
    assert_same(*(run.optimizers[0].state_dict()["state"] for run in runs))
    assert {value.dtype for value in weights(runs[0]).values()} == {torch.float32, torch.int64}
    assert runs[0].lightning_module.dtype == torch.float32


@promise(41, stock="rounded away")
def test_small_updates_are_not_lost(plugins: Plugins) -> None:
    """Steps of a thousandth of a weight, which half-precision weights would lose."""
    torch.manual_seed(0)
    module = Toy(functools.partial(torch.optim.SGD, lr=1e-5)).to(torch.bfloat16)
    before = module.net[0].weight.detach().float()
    fit(module, plugin(True) if plugins.ours else plugins.bf16())
    assert (module.net[0].weight.float() != before).all(), "updates were rounded away"


def test_lbfgs() -> None:
    """The parameter group is older than the fit, and the step evaluates the module many times."""
    lbfgs = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
    assert_same(*(fit(Loaded(half=half, optimizer=lbfgs), plugin(half)) for half in (True, False)))


class Cut(L.Callback):
    """Save a checkpoint after two epochs, and train to the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def average(callbacks: list[Any]) -> dict[str, Tensor]:
    return {} if not callbacks else weights(callbacks[0]._average_model)


AVERAGES: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "ema": lambda: [EMA()],
    "swa": lambda: [StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=1)],
}


@pytest.mark.filterwarnings("ignore:SWA is initializing after swa_start", "ignore:Found keys that are not in the model")
@pytest.mark.parametrize("averaging", [*(a for a in AVERAGES if a != "ema"), pytest.param("ema", marks=needs_averages)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.few(3)
def test_forty_steps_are_twenty_and_twenty(precision: str, averaging: str, tmp_path: Path) -> None:
    """The checkpoint holds float32, and a half-precision module that is loaded from it continues without rounding."""

    def run(*cut: L.Callback, ckpt_path: Path | None = None) -> tuple[L.Trainer, dict[str, Tensor]]:
        callbacks = AVERAGES[averaging]()
        ours = plugin(True, precision)
        module, data = Loaded(half=True), batches(10)
        trainer = fit(module, ours, data, max_epochs=4, callbacks=[*callbacks, *cut], ckpt_path=ckpt_path)
        return trainer, average(callbacks)

    whole, whole_average = run()
    run(Cut(path := tmp_path / "cut.ckpt"))
    assert torch.load(path, weights_only=False)["state_dict"]["net.inner.weight"].dtype == torch.float32
    resumed, resumed_average = run(ckpt_path=path)
    assert resumed.global_step == whole.global_step == 40 + (averaging == "swa")  # updates its BatchNorm
    assert_same(resumed, whole)
    assert_same(resumed_average, whole_average)
    assert_same(resumed.optimizers[0].state_dict()["state"], whole.optimizers[0].state_dict()["state"])
