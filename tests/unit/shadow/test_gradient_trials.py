"""What is said to help was tried, and helps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import Toy, assert_same, batches, fit
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor


class Shift(nn.Module):
    """Rounds what is small away."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0


class Ill(Toy):
    factor = 1.0

    def __init__(self, middle: nn.Module) -> None:
        adam = torch.optim.Adam  # to which the size of the loss is all the same
        super().__init__(adam, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), middle, nn.Linear(16, 1)))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.factor


class Faint(Ill):
    factor = 1e-9


class Loud(Ill):
    factor = 1e8


def last_line(caplog: pytest.LogCaptureFixture, module: Any, plugin: AmpPrecision, num: int = 20) -> str:
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(module, plugin, batches(num), callbacks=[GradientMonitor(3)])
    return next(m for m in caplog.messages if m.startswith("GradientMonitor")).splitlines()[-1]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_module_that_rounds_is_found_although_others_suffer(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = last_line(caplog, lambda: Ill(Shift()), AmpPrecision(precision))
    assert "first that of `net.3`" in text
    assert "What helps: `fp32_modules=['net.2']` (tried: " in text
    cured = last_line(caplog, lambda: Ill(Shift()), AmpPrecision(precision, fp32_modules=["net.2"]))
    assert "the gradients fit" in cured if precision == "fp16" else "up to rounding" in cured


def test_a_higher_scale(caplog: pytest.LogCaptureFixture) -> None:
    text = last_line(caplog, lambda: Faint(nn.Identity()), AmpPrecision("fp16", scaler=1.0))
    scale = re.search(r"What helps: `DynamicLossScaler\(init_scale=(.*)\)` \(tried", text)
    assert scale is not None
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(eval(scale[1])))
    assert "the gradients fit" in last_line(caplog, lambda: Faint(nn.Identity()), plugin)


def test_a_divisor_of_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    text = last_line(caplog, lambda: Loud(nn.Identity()), AmpPrecision("fp16"))
    divisor = re.search(r"What helps: dividing the loss by (\S+) \(tried", text)
    assert divisor is not None

    class Divided(Ill):
        factor = 1e8 / eval(divisor[1])

    healthy = AmpPrecision("fp16")
    assert "the gradients fit" in last_line(caplog, lambda: Divided(nn.Identity()), healthy, 40)
    assert healthy.num_steps > 20


def test_of_a_scale_that_is_settling_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Spike(Ill):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (100 if self.trainer.global_step in (6, 7) else 1)

    text = last_line(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**11)), 7)
    assert re.search(r"overflows in fp16 .* What helps: a loss scale of \S+, to which it falls by itself \(tried", text)
    text = last_line(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=2.0**11), 7)
    assert re.search(r"overflows in fp16 .* What helps: `DynamicLossScaler\(init_scale=", text)


def test_a_fault_is_tried_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_amp.shadow import GradientTrials

    runs: list[Any] = []
    run = GradientTrials.run
    monkeypatch.setattr(GradientTrials, "run", lambda self, *args: runs.append(args) or run(self, *args))
    watched = fit(lambda: Ill(Shift()), AmpPrecision("bf16"), callbacks=[GradientMonitor(1)])
    assert len(runs) == 1
    assert_same(watched, fit(lambda: Ill(Shift()), AmpPrecision("bf16")))


def test_what_fails_while_it_is_tried_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_amp.shadow import _gradient_trials

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_gradient_trials, "TrainingPass", fail)
    trainer = fit(lambda: Ill(Shift()), AmpPrecision("bf16"), callbacks=[GradientMonitor()])
    assert trainer.global_step == 8
