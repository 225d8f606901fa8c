"""Rows 13, 17, 25, 26: what can be known to be wrong is said when the Trainer attaches, with names and the fix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import FEATURES, Toy, batches, fit, quiet_trainer, stock
from support.promises import Plugins, plain_sgd, promise
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision


class Never(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise AssertionError("reached the first batch")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters(precision: str, dtype: torch.dtype) -> None:
    module = Never()
    module.net[2].to(dtype)
    with pytest.raises(ValueError, match=r"`net.2.weight`, `net.2.bias`.*Call `.float\(\)`"):
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


def test_a_healthy_module_is_not_bothered() -> None:
    fit(Toy, Plugins(True).bf16())  # warnings are errors


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(26, stock="same dtype|dtype", raises=RuntimeError)
def test_float64_batches(plugins: Plugins, precision: str) -> None:
    data = DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4)
    trainer = fit(Toy, getattr(plugins, precision)(), data)
    assert trainer.global_step == 2


@pytest.mark.parametrize("validating", [False, True])
def test_fp32_names_what_is_float64_in_a_batch(validating: bool) -> None:
    """Torch says "mat1 and mat2 must have the same dtype", and leaves the user to find out of what."""

    class Named(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch["inputs"][0]
            return self.loss(x.float() if validating else x)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch["inputs"][0])

    rows = [{"inputs": (torch.randn(FEATURES, dtype=torch.float64),), "index": torch.tensor(i)} for i in range(4)]
    loader = DataLoader(rows, batch_size=2)
    trainer = quiet_trainer(plugins=[AmpPrecision("fp32")], num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match=r"`batch\['inputs'\]\[0\]` is float64.*Make the dataset return float32"):
        trainer.fit(Named(), loader, loader)


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("double trouble" if batch.dtype == torch.float32 else "something else")

    for dtype in (torch.float32, torch.float64):
        loader = DataLoader(torch.randn(4, FEATURES, dtype=dtype), batch_size=2)
        with pytest.raises(RuntimeError, match="^(double trouble|something else)$"):
            fit(Fails, AmpPrecision("fp32"), loader)


def test_float64_modules_keep_their_batches() -> None:
    seen: list[torch.dtype] = []

    class Double(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(batch.dtype)
            return (self.net(batch).float() ** 2).mean()

    module = Double()
    module.net.double()
    fit(module, Plugins(True).bf16(), DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4))
    assert seen == [torch.float64] * 2


def test_batches_are_not_copied_for_nothing() -> None:
    batch = next(iter(batches(1)))
    plugin = AmpPrecision("bf16")
    fit(Toy, plugin)
    seen: list[Any] = []

    class Looks(Toy):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append(self.trainer.precision_plugin.convert_input({"x": batch})["x"] is batch)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    fit(Looks, plugin)
    assert seen == [True] * 8
    assert plugin.convert_input(batch) is batch


class CastsItsWeight(Toy):
    """As some libraries of metric losses do: the weight follows the dtype of what comes in."""

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
