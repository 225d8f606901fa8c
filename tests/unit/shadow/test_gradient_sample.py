"""The sampled gradients of one batch agree with gradients computed by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, Manual, Toy, assert_same, batches, fit, scaled_fp32
from torch import Tensor, nn
from zoo.overflows import fp16

from lightning_amp import AmpPrecision, GradientMonitor
from lightning_amp.precision import scaled_grad


def drops() -> Toy:
    module = Toy(net=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)))
    module.generator = torch.Generator(DEVICE).manual_seed(3)
    module.loss = lambda batch: (  # type: ignore[method-assign]
        module.net(batch + torch.rand(batch.shape, generator=module.generator, device=DEVICE)).float().square().mean()
    )
    return module


def test_values_against_the_gradient_of_a_hand_written_step() -> None:
    found: dict[str, Any] = {}

    class ByHand(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                loss = module.loss(batch)
                names = [name for name, _ in module.named_parameters()]
                found.update(zip(names, torch.autograd.grad(loss, list(module.parameters())), strict=True))

    monitor = GradientMonitor(by="parameter")
    fit(Toy, fp16(1024.0), batches(2), callbacks=[ByHand(), monitor])
    rows = {row.name: row for row in monitor.table if row.step == 1}
    assert list(rows) == [*found, "(all)"]
    for name, gradient in found.items():
        row = rows[name]
        assert row.largest == pytest.approx(float(gradient.abs().max()))
        assert row.headroom_bits == pytest.approx(math.log2(65504 / (1024 * row.largest)), abs=1e-4)
        half = (gradient * 1024).half()
        assert row.num_values == gradient.count_nonzero()
        assert row.underflow_fraction == pytest.approx(float(((half == 0) & (gradient != 0)).float().mean()))
        assert 40 < row.sqnr_db < 100
        assert row.cosine == pytest.approx(1, abs=1e-4)
    total = rows["(all)"]
    assert total.num_values == sum(g.count_nonzero() for g in found.values())
    assert total.largest >= max(row.largest for row in rows.values())


def test_in_fp32_both_sides_are_equal() -> None:
    for plugin in (AmpPrecision("fp32"), scaled_fp32(init_scale=64.0)):
        monitor = GradientMonitor(3)
        fit(drops, plugin, callbacks=[monitor])
        assert {row.sqnr_db for row in monitor.table} == {math.inf}
        assert {round(row.cosine, 6) for row in monitor.table} == {1.0}
        assert {row.scale for row in monitor.table} == ({64.0} if plugin.scaler else {1.0})


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_a_module_on_two_devices() -> None:
    class Split(Toy):
        def configure_optimizers(self) -> Any:
            self.net[2].to(f"{DEVICE}:1")
            return super().configure_optimizers()

        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.net[1](self.net[0](batch))
            return self.net[2](hidden.to(f"{DEVICE}:1")).to(batch.device).float().square().mean()

    monitor = GradientMonitor()
    fit(Split, fp16(), callbacks=[monitor])
    assert [row.name for row in monitor.table.last] == ["net.0", "net.2", "(all)"]
    assert all(row.cosine > 0.99 for row in monitor.table.last)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_gradient_of_the_loss_itself_says_nothing(precision: str) -> None:
    """The output of a criterion, or of a Hugging Face model, is the loss: its gradient is the scale, in fp32."""

    class WithCriterion(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.MSELoss()

        def loss(self, batch: Tensor) -> Tensor:
            return self.criterion(0.1 * self.net(batch).float(), 0.1 * batch.sum(1, keepdim=True))

    monitor = GradientMonitor()
    trainer = fit(WithCriterion, AmpPrecision(precision), callbacks=[monitor])
    if precision == "fp16":
        assert trainer.precision_plugin.num_skipped == 0
    total, *rows = reversed(monitor.table.last)
    assert total.largest < 0.5
    if precision != "fp32":  # in which nothing is known of what fp16 would compute in fp32
        assert total.headroom_bits == min(row.headroom_bits for row in rows)


def test_manual_optimization_with_two_optimizers() -> None:
    class Gan(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for opt, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                self.toggle_optimizer(opt)
                self.manual_backward(net(batch).float().square().mean())
                opt.step()
                opt.zero_grad()
                self.untoggle_optimizer(opt)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(n.parameters(), lr=0.01) for n in (self.net, self.other)]

    monitor = GradientMonitor(3)
    watched, alone = fit(Gan, fp16(), callbacks=[monitor]), fit(Gan, fp16())
    assert {row.name for row in monitor.table} == {"net.0", "net.2", "other", "(all)"}
    assert all(row.sqnr_db > 40 for row in monitor.table)
    assert [row.step for row in monitor.table if row.name == "other"] == [2, 4, 6, 10, 12]  # two a batch
    assert_same(watched, alone)


class Penalised(Manual):
    """A critic and a generator, with a penalty on the critic's derivative by its input."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.generator = nn.Linear(8, 8)

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        real = batch.clone().requires_grad_()
        score = 30 * self.net(real).sum()
        if self.scaled:
            (slope,) = scaled_grad(self.trainer, score, real, create_graph=True)
        else:
            (slope,) = torch.autograd.grad(score, real, create_graph=True)
        return 1e-4 * slope.float().square().mean(), 1e-2 * self.generator(batch).float().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for loss, optimizer in zip(self.losses(batch), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.0) for part in (self.net, self.generator)]


@pytest.mark.parametrize("scaled", [False, True])
def test_the_gradients_of_an_inner_derivative_do_not_count(scaled: bool) -> None:
    """Inner gradients are 1 and more; gradients of the loss are far below."""
    largest: list[float] = []

    class ByHand(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
            copied, outputs = copy.deepcopy(module), list[Tensor]()
            copied.scaled = False
            for layer in (*copied.net, copied.generator):
                layer.register_forward_hook(lambda _, args, output: outputs.append(output))
            loss = sum(copied.losses(batch))
            wanted = [*copied.parameters(), *outputs]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
            largest.append(max(float(g.abs().max()) for g in gradients if g is not None))

    monitor = GradientMonitor()
    fit(lambda: Penalised(scaled), fp16(), batches(2), callbacks=[ByHand(), monitor])
    total = next(row for row in monitor.table if row.name == "(all)")
    assert largest[1] < 0.1  # of the batch that is sampled
    assert total.largest == pytest.approx(largest[1], rel=1e-5)
    assert total.headroom_bits == pytest.approx(math.log2(65504 / (64 * largest[1])), abs=1e-4)
    assert monitor.recommended_scale == 2.0 ** math.floor(math.log2(65504 / largest[1] / 4))


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: torch.empty_like(x).normal_()])
def test_noise_like_an_activation_is_the_same_in_both_precisions(draw: Any) -> None:
    """A variational autoencoder draws such noise; for 100 values the CPU draws others in half precision."""

    class Noisy(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            hidden = self.net[0](batch.repeat(25, 1))[:, :1].contiguous()
            return (hidden.float() + 3 * draw(hidden).float()).square().mean()

    monitor = GradientMonitor()
    fit(Noisy, fp16(), batches(2), callbacks=[monitor])
    assert monitor.table.last[-1].sqnr_db > 40
