"""The same weights, bit for bit, from `FabricAmpPrecision` in a Fabric loop as from `AmpPrecision` in the Trainer."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from support import FEATURES, Toy, assert_same, batches, fit, weights, with_batch_norm
from support.fabric import CASES, Infinite, make_fabric, optimizer_tensors, spoilt
from support.fp8 import Deep, emulated, needs_torchao
from support.promises import OPTIMIZERS, fused_adamw
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision

BAD: Any = {2: "gradient", 4: "loss", 9: "gradient"}
POLICY: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 5}
CLIPS: dict[str, Any] = {"no clip": {}, "norm": {"max_norm": 0.3}, "value": {"clip_val": 0.05}}


def scaler(precision: str) -> DynamicLossScaler | None:
    return DynamicLossScaler(**POLICY) if precision == "fp16" else None


class Troubled(Toy):
    """The module of the Trainer's side, with bad batches."""

    def __init__(self, optimizer: Any, norm: bool = False) -> None:
        super().__init__(optimizer, with_batch_norm() if norm else None, lambda o: ExponentialLR(o, 0.9))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Without a hook, the Trainer's plugin clips inside of a fused step, which rounds in another order."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return spoilt(self.loss(batch), BAD.get(batch_idx))


def by_trainer(precision: str, optimizer: Any, clip: Any, norm: bool) -> tuple[Any, AmpPrecision]:
    plugin = AmpPrecision(precision, scaler=scaler(precision))
    value = clip.get("max_norm", clip.get("clip_val"))
    trainer = fit(
        lambda: Troubled(optimizer, norm), plugin, batches(20), gradient_clip_val=value,
        gradient_clip_algorithm="value" if "clip_val" in clip else None,
    )  # fmt: skip
    return (weights(trainer), optimizer_tensors(trainer.optimizers[0])), plugin


def by_fabric(precision: str, optimizer: Any, clip: Any, norm: bool) -> Any:
    torch.manual_seed(0)
    plugin = FabricAmpPrecision(precision, scaler=scaler(precision))
    fabric = make_fabric(plugin)
    toy = Troubled(optimizer, norm)
    raw = optimizer(toy.parameters())
    model, opt = fabric.setup(toy.net, raw)
    schedule = plugin.guard(ExponentialLR(raw, 0.9))
    for index, batch in enumerate(fabric.to_device(b) for b in batches(20)):
        loss = nn.functional.mse_loss(model(batch).float(), batch.sum(1, keepdim=True))
        fabric.backward(spoilt(loss, BAD.get(index)))
        if clip:
            fabric.clip_gradients(model, opt, **clip)
        opt.step()
        opt.zero_grad()
        schedule.step()
    plugin.flush()
    found = {f"net.{name}": value for name, value in weights(model.module).items()}
    return (found, optimizer_tensors(opt)), plugin


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.few(5)
def test_one_optimizer(precision: str, optimizer: str, clip: str) -> None:
    """Also the optimizer's state, the scale, the counts and the last record."""
    norm = clip == "norm"
    arguments = precision, OPTIMIZERS[optimizer], CLIPS[clip], norm
    (ours, plugin), (theirs, other) = by_fabric(*arguments), by_trainer(*arguments)
    assert_same(move_data_to_device(ours, "cpu"), move_data_to_device(theirs, "cpu"))
    assert (plugin.num_steps, plugin.num_skipped) == (other.num_steps, other.num_skipped)
    assert plugin.num_skipped >= 2
    assert plugin.last_step == other.last_step
    if precision == "fp16":
        assert plugin.scaler.state_dict() == other.scaler.state_dict()


class Pair(L.LightningModule):
    """Two nets with an optimizer each, as in a GAN. The Trainer's side and Fabric's call the same losses."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimizer = optimizer
        self.one = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.two = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    @staticmethod
    def losses(one: Any, two: Any, batch: Tensor, index: int) -> Any:
        """Yield the loss of each net."""

        def first() -> Tensor:
            made = one(batch).float()
            return (two(made).float() - 1).pow(2).mean() + (made - batch).pow(2).mean()

        def second() -> Tensor:
            loss = two(batch).float().pow(2).mean() + (two(one(batch).detach()).float() - 1).pow(2).mean()
            return Infinite.apply(loss) if index == 3 else loss

        return first, second

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        losses = self.losses(self.one, self.two, batch, batch_idx)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self.optimizer(self.one.parameters()), self.optimizer(self.two.parameters())]


def pair_by_fabric(precision: str, optimizer: Any) -> Any:
    torch.manual_seed(0)
    plugin = FabricAmpPrecision(precision, scaler=scaler(precision))
    fabric = make_fabric(plugin)
    pair = Pair(optimizer)
    raw = pair.configure_optimizers()
    one, first = fabric.setup(pair.one, raw[0])
    two, second = fabric.setup(pair.two, raw[1])
    for index, batch in enumerate(fabric.to_device(b) for b in batches(20)):
        losses = Pair.losses(one, two, batch, index)
        for model, opt, loss in ((one, first, losses[0]), (two, second, losses[1])):
            opt.zero_grad()
            fabric.backward(loss())
            fabric.clip_gradients(model, opt, max_norm=0.5)
            opt.step()
    plugin.flush()
    return pair, plugin


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.few(4)
def test_two_optimizers(precision: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    pair, plugin = pair_by_fabric(precision, make)
    other = AmpPrecision(precision, scaler=scaler(precision))
    trainer = fit(lambda: Pair(make), other, batches(20))
    assert_same(move_data_to_device(weights(pair), "cpu"), weights(trainer))
    assert (plugin.num_steps, plugin.num_skipped) == (other.num_steps, other.num_skipped)
    assert plugin.num_skipped > 0
    if precision == "fp16":
        assert plugin.scaler.state_dict() == other.scaler.state_dict()


def test_the_comparison_can_fail() -> None:
    """Fabric's plugin rounds inputs, so it cannot have the same bits."""
    (ours, _), (theirs, _) = (by_fabric(p, fused_adamw, {}, False) for p in ("fp16", "bf16"))
    with pytest.raises(AssertionError, match="are not"):
        assert_same(move_data_to_device(ours, "cpu"), move_data_to_device(theirs, "cpu"))


@needs_torchao
@pytest.mark.filterwarnings("ignore:.*emulate")
@pytest.mark.usefixtures("where_flags_live")
def test_fp8(caplog: pytest.LogCaptureFixture) -> None:
    """The layers in fp8 and the summary in the first line are the same, and evaluation runs in bf16 in both."""
    caplog.set_level("INFO")
    other = AmpPrecision("fp8", fp8_recipe=emulated())
    trainer = fit(lambda: Toy(fused_adamw, Deep(FEATURES)), other, batches(6))
    torch.manual_seed(0)
    plugin = FabricAmpPrecision("fp8", fp8_recipe=emulated())
    fabric = make_fabric(plugin)
    toy = Toy(fused_adamw, Deep(FEATURES))
    model, optimizer = fabric.setup(toy.net, fused_adamw(toy.parameters()))
    assert plugin.fp8_layers == {}
    for batch in map(fabric.to_device, batches(6)):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(batch).float(), batch.sum(1, keepdim=True)))
        optimizer.step()
    in_fp8 = [name for name, reason in plugin.fp8_layers.items() if reason is None]
    assert in_fp8 == [name.removeprefix("net.") for name, reason in other.fp8_layers.items() if reason is None]
    assert in_fp8
    summaries = re.findall(r"lightning_amp: (fp8 products in 4 of 6 .*? FLOPs), own recipe", caplog.text)
    assert len(summaries) == 2
    assert len(set(summaries)) == 1
    found = {f"net.{name}": value for name, value in weights(model.module).items()}
    assert_same(move_data_to_device(found, "cpu"), move_data_to_device(weights(trainer), "cpu"))
    batch = torch.randn(4, FEATURES, device=fabric.device)
    model.eval()
    with torch.no_grad(), torch.autocast(batch.device.type, torch.bfloat16):
        expected = model.module(batch)
    with torch.no_grad():
        assert torch.equal(model(batch), expected.float())
