"""`GradientMonitor` names the module, or the loss scale, that loses a gradient; its tried setting helps."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from support import Manual, Toy, batches, fit
from torch import Tensor, nn
from zoo.overflows import LargeOutput

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor, ScaleMonitor


class Shift(nn.Module):
    """Rounds small values away."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0


class Rotary(nn.Module):
    """Rounds its positions."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(4096, 4096 + x.shape[1], device=x.device).to(x.dtype)
        return x * angles.cos() + x.flip(1) * angles.sin()


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e6


class Ill(Toy):
    factor = 1.0

    def __init__(self, middle: nn.Module) -> None:
        adam = torch.optim.Adam  # whose steps do not depend on the size of the loss
        super().__init__(adam, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), middle, nn.LayerNorm(16), nn.Linear(16, 1)))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.factor


class TooLarge(Ill):
    factor = 1e8


def words(caplog: pytest.LogCaptureFixture, module: Any, plugin: AmpPrecision, num: int = 20) -> str:
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(module, plugin, batches(num), callbacks=[GradientMonitor(3)])
    return next(m for m in caplog.messages if m.startswith("GradientMonitor"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("middle", [Shift, Rotary])
def test_the_module_that_rounds_is_found(middle: Any, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, lambda: Ill(middle()), AmpPrecision(precision))
    bits = {"fp16": 11, "bf16": 8}[precision]
    assert re.search(rf"the gradient keeps \d of {bits} bits of fp32", text), text
    assert f"`net.2` ({middle.__name__}): its output keeps " in text
    fixed = re.search(r"fix: `fp32_modules=\['net.2'\]` \(tried: works\); the gradient then keeps (\d+) of", text)
    assert fixed is not None
    assert int(fixed[1]) > bits / 2
    cured = words(caplog, lambda: Ill(middle()), AmpPrecision(precision, fp32_modules=["net.2"]))
    assert "fix" not in cured
    assert len(cured.splitlines()) == 1


def test_an_overflow_of_the_forward_is_named_and_not_the_head(caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, lambda: Ill(Loud()), AmpPrecision("fp16"))
    assert "the forward is infinite or NaN, and in fp32 it is not" in text
    assert "`net.2` (Loud): its output is not finite in fp16, although its inputs are" in text
    assert "net.4" not in text
    several = nn.Sequential(Loud(), nn.LayerNorm(16), nn.Linear(16, 16), Loud())
    text = words(caplog, lambda: Ill(several), AmpPrecision("fp16"))
    assert "tried, does not help: `fp32_modules=['net.2.0']`; `find_fp32_modules` searches" in text


def test_a_fix_works_only_if_the_loss_is_finite(caplog: pytest.LogCaptureFixture) -> None:
    """The gradient is close to fp32 with any module in fp32, and the sum outside of the modules still overflows."""

    class SumsInHalf(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            out = self.net(batch)
            return out.float().square().mean() + 1e-6 * (out * out + 30).half().mul(5000).mean()

    text = words(caplog, SumsInHalf, AmpPrecision("fp16"))
    assert "the forward is infinite or NaN, and in fp32 it is not" in text
    assert "`OverflowLocator` finds the operation" in text
    assert "tried" not in text


def test_an_overflow_of_a_large_output_is_cured_before_the_scale_has_settled(caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, LargeOutput, AmpPrecision("fp16"))
    assert "`net.0` (Linear): its output is not finite in fp16" in text
    assert re.search(
        r"fix: `fp32_modules=\['net.0'\]` and a loss scale of \d+, to which it falls by itself \(tried", text
    )


@pytest.mark.parametrize("factor", [1e-9, 1e-14])
def test_a_higher_scale(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    class Faint(Ill):
        pass

    Faint.factor = factor
    text = words(caplog, lambda: Faint(nn.Identity()), AmpPrecision("fp16", scaler=1.0))
    assert "% of the gradient rounds to zero" in text
    scale = re.search(r"fix: `DynamicLossScaler\(init_scale=(.*)\)` \(tried: works\)", text)
    assert scale is not None
    assert ("max_scale" in scale[1]) == (factor < 1e-9)
    plugin = AmpPrecision("fp16", scaler=eval(f"DynamicLossScaler({scale[1]})"))
    assert "it fits" in words(caplog, lambda: Faint(nn.Identity()), plugin)


class Narrow(nn.Module):
    """Its own backward passes through subnormal numbers. The gradients of all parameters are normal ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half() * 3e4 * 3e-5


class CoarseWeight(torch.autograd.Function):
    """Multiplies by a weight, and loses the gradient of the weight in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        large = 4096 * gradient.abs().max()
        return gradient * weight.to(x.dtype), (gradient * x + large - large).sum(0).to(weight.dtype)


class Coarse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        is_half = torch.is_autocast_enabled(x.device.type)  # whatever the modules before it are in
        return CoarseWeight.apply(x.half() if is_half else x.float(), self.weight)


def test_a_module_that_loses_its_own_gradient_only_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, lambda: Ill(Coarse()), AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0)))
    assert "`net.2` 0 of 11 bits\n  fix: `fp32_modules=['net.2']` (tried: works)" in text


class Narrows(Ill):
    factor = 1e-3

    def __init__(self) -> None:
        super().__init__(Narrow())


def test_values_that_lose_their_bits_inside_get_a_higher_scale(caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, Narrows, AmpPrecision("fp16", scaler=1.0))
    assert "the gradient keeps" in text
    scale = re.search(r"fix: `(DynamicLossScaler\(init_scale=.*)` \(tried: works\)", text)
    assert scale is not None
    assert "it fits" in words(caplog, Narrows, AmpPrecision("fp16", scaler=eval(scale[1])))


def test_a_divisor_of_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    text = words(caplog, lambda: TooLarge(nn.Identity()), AmpPrecision("fp16"))
    divisor = re.search(r"fix: dividing the loss by (\S+), and the `eps` of Adam too \(tried: works\)", text)
    assert divisor is not None

    class Divided(Ill):
        factor = 1e8 / eval(divisor[1])

    healthy = AmpPrecision("fp16")
    assert "it fits" in words(caplog, lambda: Divided(nn.Identity()), healthy, 40)
    assert healthy.num_steps > 20


def test_a_scale_that_falls_by_itself_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    class Spike(Ill):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (100 if self.trainer.global_step in (6, 7) else 1)

    text = words(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**14)), 7)
    assert re.search(r"infinite or NaN.*\n.*\n  fix: a loss scale of \S+, to which it falls by itself \(tried", text)
    text = words(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=2.0**14), 7)
    assert re.search(r"infinite or NaN.*\n.*\n  fix: `DynamicLossScaler\(init_scale=", text)

    class Infinite(Spike):  # with finite gradients
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) - math.inf

    text = words(caplog, lambda: Infinite(nn.Identity()), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**14)), 7)
    assert re.search(r"fix: `scaler=\S+`, because a loss that is not finite does not lower it \(tried", text)


@pytest.mark.parametrize("falls", [False, True])
def test_a_scale_from_which_the_run_has_fallen_is_not_recommended(
    falls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(Ill):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (1e9 if falls and self.trainer.global_step == 10 else 1e-5)  # not sampled

    scaler = DynamicLossScaler(2.0**14, backoff_factor=2.0**-14) if falls else DynamicLossScaler(1.0)
    text = words(caplog, lambda: Small(nn.Identity()), AmpPrecision("fp16", scaler=scaler))
    assert ("DynamicLossScaler(init_scale=" in text) is not falls


def test_a_scale_that_fits_the_backward_is_not_a_fix_for_the_forward(caplog: pytest.LogCaptureFixture) -> None:
    class Diverges(Ill):
        def loss(self, batch: Tensor) -> Tensor:
            step = self.trainer.global_step
            return super().loss(batch * (1e6 if step > 8 else 1)) * (100 if step in (6, 7) else 1)

    text = words(caplog, lambda: Diverges(nn.Identity()), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**14)), 12)
    assert "the forward is infinite or NaN" in text
    assert "fix: a loss scale" not in text


def test_a_step_that_has_one_length_too_few_is_described(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(Manual):
        def edit(self, optimizer: Any, batch_idx: int) -> None:
            scale = self.trainer.precision_plugin.scaler.get_scale()
            for parameter in self.parameters():
                parameter.grad = parameter.grad / scale

    text = words(caplog, Twice, AmpPrecision("fp16", scaler=DynamicLossScaler(64.0)))
    assert "the direction of fp32, but 0.0156 times its length" in text
    assert "or divides by the scale like the plugin" in text


@pytest.mark.parametrize(
    ("size", "advice"),
    [(1e-7, "  fix: `self.manual_backward(loss)`, because"), (1e-6, "; `self.manual_backward(loss)` with `Dynamic")],
)
def test_a_backward_without_the_scale_is_told_which_one_has_it(
    size: float, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            (self.loss(batch) * size).backward()
            optimizer.step()

    assert advice in words(caplog, Plain, AmpPrecision("fp16"))
    monitor = ScaleMonitor()
    fit(Plain, AmpPrecision("fp16"), callbacks=[monitor])
    assert "0 of 8 steps skipped; no step used the loss scale, which a plain" in monitor.history.summary()


def test_a_difference_that_rounds_is_no_clipping(caplog: pytest.LogCaptureFixture) -> None:
    """The direction of the gradient is exact, and its length is a difference of two numbers, rounded to 0.25."""

    class Energy(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return ((1e-3 * self.net(batch) + 400.1).mean() - 399.95).float().square()

    text = words(caplog, Energy, AmpPrecision("fp16"))
    assert "the gradient keeps 0 of 11 bits of fp32" in text
