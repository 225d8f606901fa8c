"""Faults of a gradient are found in the rows of a sample, and the advised settings help."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from support import Toy, assert_same, batches, fit
from support.tables import gradient_row
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor
from lightning_amp.causes.gradient import _remedies
from lightning_amp.causes.gradient._remedies import GradientRemedies
from lightning_amp.causes.gradient._search import find_gradient_fault
from lightning_amp.findings import GradientRow


class Shift(nn.Module):
    """Rounds small values away."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0


class Ill(Toy):
    factor = 1.0

    def __init__(self, middle: nn.Module) -> None:
        adam = torch.optim.Adam  # whose steps do not depend on the size of the loss
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
def test_the_module_that_rounds_is_found(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    text = last_line(caplog, lambda: Ill(Shift()), AmpPrecision(precision))
    assert "first in `net.3`" in text
    assert "Try: `fp32_modules=['net.2']` (tried: " in text
    cured = last_line(caplog, lambda: Ill(Shift()), AmpPrecision(precision, fp32_modules=["net.2"]))
    assert "the gradients fit" in cured if precision == "fp16" else "up to rounding" in cured


def test_a_higher_scale(caplog: pytest.LogCaptureFixture) -> None:
    text = last_line(caplog, lambda: Faint(nn.Identity()), AmpPrecision("fp16", scaler=1.0))
    scale = re.search(r"Try: `DynamicLossScaler\(init_scale=(.*)\)` \(tried", text)
    assert scale is not None
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(eval(scale[1])))
    assert "the gradients fit" in last_line(caplog, lambda: Faint(nn.Identity()), plugin)


def test_a_divisor_of_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    text = last_line(caplog, lambda: Loud(nn.Identity()), AmpPrecision("fp16"))
    divisor = re.search(r"Try: dividing the loss by (\S+) \(tried", text)
    assert divisor is not None

    class Divided(Ill):
        factor = 1e8 / eval(divisor[1])

    healthy = AmpPrecision("fp16")
    assert "the gradients fit" in last_line(caplog, lambda: Divided(nn.Identity()), healthy, 40)
    assert healthy.num_steps > 20


def test_a_scale_that_falls_by_itself_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    class Spike(Ill):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (100 if self.trainer.global_step in (6, 7) else 1)

    text = last_line(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=DynamicLossScaler(2.0**11)), 7)
    assert re.search(r"overflows in fp16 .* Try: a loss scale of \S+, to which it falls by itself \(tried", text)
    text = last_line(caplog, lambda: Spike(nn.Identity()), AmpPrecision("fp16", scaler=2.0**11), 7)
    assert re.search(r"overflows in fp16 .* Try: `DynamicLossScaler\(init_scale=", text)


def test_a_fault_is_tried_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    try_all = GradientRemedies.try_all
    monkeypatch.setattr(GradientRemedies, "try_all", lambda self, *args: runs.append(args) or try_all(self, *args))
    watched = fit(lambda: Ill(Shift()), AmpPrecision("bf16"), callbacks=[GradientMonitor(1)])
    assert len(runs) == 1
    assert_same(watched, fit(lambda: Ill(Shift()), AmpPrecision("bf16")))


def test_a_setting_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_remedies, "TrainingPass", fail)
    trainer = fit(lambda: Ill(Shift()), AmpPrecision("bf16"), callbacks=[GradientMonitor()])
    assert trainer.global_step == 8


# -- rows --------------------------------------------------------------------------------------------------------------


NAN: dict[str, Any] = {"sqnr_db": math.nan, "cosine": math.nan}


def rows(*changed: dict[str, Any], total: dict[str, Any], **common: Any) -> list[GradientRow]:
    """Return rows `a`, `b`, ... in the order of the forward, and the row of all gradients."""
    common = {"precision": "fp16", "norm_ratio": 1.0, **common}
    named = zip("abcdef", changed, strict=False)
    return [*(gradient_row(0, n, **{**common, **c}) for n, c in named), gradient_row(0, "(all)", **{**common, **total})]


def found(*args: Any, clipped: str = "", **kwargs: Any) -> tuple[str, str] | None:
    fault = find_gradient_fault(rows(*args, **kwargs), ["c", "b", "a"], clipped)
    return None if fault is None else fault.cause[:2]


@pytest.mark.parametrize(
    ("changed", "total", "cause"),
    [
        (({}, {}, {}), {}, None),
        (
            ({"sqnr_db": -60.0}, {}, {}),
            {},
            None,
        ),  # zero up to rounding, as of a bias before a normalisation
        (({"sqnr_db": 8.0}, {}, {}), {}, None),
        (({}, {"largest": 0.0, "sqnr_db": math.inf}, {}), {}, None),
        (({"sqnr_db": 1.0}, {"sqnr_db": 2.0}, {}), {"sqnr_db": 3.0, "cosine": 0.5}, ("rounding", "b")),
        (({"sqnr_db": 1.0}, {}, {}), {"sqnr_db": 30.0}, ("rounding", "a")),
        (({"sqnr_db": 0.0, "underflow_fraction": 1.0, "norm_ratio": 0.0}, {}, {}), {}, ("zero", "a")),
        ((NAN, NAN, {}), NAN, ("overflow", "b")),
        (({**NAN, "largest": math.nan}, {}, {}), {**NAN, "largest": math.nan}, ("nan", "a")),
        (({**NAN, "largest": math.inf}, {}, {}), {**NAN, "largest": math.inf}, ("infinite", "a")),
        (({"sqnr_db": 0.0, "norm_ratio": 1e-4},) * 3, {"sqnr_db": 0.0, "norm_ratio": 1e-4}, ("length", "c")),
    ],
)
def test_kinds(changed: Any, total: Any, cause: Any) -> None:
    assert found(*changed, total=total) == cause


def test_in_bf16_nothing_becomes_zero() -> None:
    lost = {"sqnr_db": 1.0, "norm_ratio": 0.2, "underflow_fraction": 1.0, "cosine": 0.5}
    assert found(lost, {}, total=lost, precision="bf16") == ("rounding", "a")


def test_clipping_is_a_fault_only_if_it_changed_the_gradient() -> None:
    assert found({}, {}, total={}, clipped="`clip_grad_norm_`") is None
    assert found(NAN, {}, total={**NAN, "norm_ratio": math.nan}, clipped="`clip_grad_value_`") == ("length", "a")
