"""Rows 13, 17, 25: the plugin reports mistakes when the Trainer attaches, with names and the fix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import FEATURES, Toy, fit, stock
from support.promises import Plugins, plain_sgd, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision


class Never(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise AssertionError("reached the first batch")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters(precision: str, dtype: torch.dtype) -> None:
    module = Never()
    module.net[2].to(dtype)
    with pytest.raises(ValueError, match=r"`net.2.weight`, `net.2.bias`.*`upcast_parameters=True`.*`.float\(\)`"):
        fit(module, getattr(Plugins(True), precision)())


@promise(13, stock="Attempting to unscale FP16 gradients", raises=(ValueError, RuntimeError))
def test_frozen_half_parameters_are_fine(plugins: Plugins) -> None:
    module = Toy(lambda params: plain_sgd([p for p in params if p.requires_grad]))
    module.net[0].half()
    module.net[0].requires_grad_(not plugins.ours)  # Lightning: shows how it fails where they are not frozen
    fit(module, plugins.fp16())


class OwnScaler(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.my_scaler = torch.amp.GradScaler("cpu")


class OwnAutocast(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.loss(batch)


class OwnLoss(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.BCELoss()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (OwnScaler, "its own `GradScaler` .`self.my_scaler`"),
        (OwnAutocast, "`training_step` uses `torch.autocast` itself"),
        (OwnLoss, "`nn.BCELoss` .`criterion`.*BCEWithLogitsLoss"),
    ],
)
def test_said_once(module: type[Toy], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        fit(module, Plugins(True).bf16())
    assert sum("lightning_amp" in str(w.message) for w in caught) == 1


class AutocastOff(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.autocast("cpu", enabled=False):
            self.net(batch)
        # fmt: off
        with torch.autocast(
            "cpu",
            enabled=False,
        ):
            return self.loss(batch)
        # fmt: on


@pytest.mark.parametrize("module", [Toy, AutocastOff])
def test_a_healthy_module_is_not_bothered(module: type[Toy]) -> None:
    fit(module, Plugins(True).bf16())  # warnings are errors


class CastsItsWeight(Toy):
    """Casts its weight to the dtype of its input, as some libraries of metric losses do."""

    class Proxies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, FEATURES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.to(x.dtype)
            return (x @ self.weight.T).float().square().mean()

    def __init__(self, make: Any = torch.optim.Adam) -> None:
        super().__init__(lambda params: make(params, lr=1e-3), nn.Linear(FEATURES, FEATURES))
        self.proxies = self.Proxies()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.proxies(self.net(batch))


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_becomes_float16_in_the_forward(fused: bool) -> None:
    make = functools.partial(torch.optim.Adam, fused=fused)
    with pytest.raises(ValueError, match=r"became half precision.*`proxies.weight`.*fp32_modules=\['proxies'\]"):
        fit(lambda: CastsItsWeight(make), AmpPrecision("fp16"))
    plugin = AmpPrecision("fp16", fp32_modules=["proxies"])  # what it says
    trainer = fit(lambda: CastsItsWeight(make), plugin)
    assert plugin.num_steps > 0
    assert {p.dtype for p in trainer.lightning_module.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(lambda: CastsItsWeight(functools.partial(torch.optim.Adam)), stock("fp16"))


def test_a_parameter_that_becomes_bfloat16_in_the_forward_is_said() -> None:
    with pytest.warns(UserWarning, match=r"became half precision.*`proxies.weight`") as warned:
        fit(CastsItsWeight, AmpPrecision("bf16"))
    assert len([w for w in warned if "became half" in str(w.message)]) == 1
    fit(CastsItsWeight, AmpPrecision("bf16", fp32_modules=["proxies"]))
