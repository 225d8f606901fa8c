"""`upcast_parameters` makes half-precision parameters float32 in place, with buffers, averages and checkpoints."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, Toy, assert_same, batches, fit, quiet_trainer, weights
from support.averages import EMAWeightAveraging, needs_averages
from torch import Tensor, nn

from lightning_amp import AmpPrecision

LOGGER = "lightning.pytorch.utilities.rank_zero"
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def half(**kwargs: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(adamw, **kwargs).to(torch.bfloat16)


def upcasting(precision: str = "bf16", **kwargs: Any) -> AmpPrecision:
    return AmpPrecision(precision, upcast_parameters=True, **kwargs)


@pytest.mark.parametrize("value", [1, None, "yes", torch.float32])
def test_bad_input(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`upcast_parameters` must be `True` or `False`, got"):
        AmpPrecision("bf16", upcast_parameters=value)


def test_one_line(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.Linear(512, 512), nn.Linear(512, 1))
    net[3].requires_grad_(False)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(half(net=net), upcasting(), batches(1))
    assert (
        "lightning_amp: 6 trainable bfloat16 parameters (268,288 values) became float32, and 2 buffers with them:"
        " 526 KiB more, plus gradients and optimizer state in float32. Unchanged: 2 frozen parameters in half"
        " precision."
    ) in caplog.messages


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_the_argument_the_error_names_it(precision: str) -> None:
    with pytest.raises(ValueError, match="Pass `upcast_parameters=True` to the plugin, or call `.float\\(\\)` on the"):
        fit(half(), AmpPrecision(precision))
    with pytest.raises(ValueError, match="pass `upcast_parameters=True` to the plugin if it is trained"):
        fit(half(), AmpPrecision(precision, fp32_modules=["net.0"]))


def test_before_fp32_modules_are_installed() -> None:
    assert fit(half(), upcasting(fp32_modules=["net.0"])).lightning_module.net[0].weight.dtype == torch.float32


class Validates(Toy):
    def __init__(self) -> None:
        super().__init__(adamw)
        self.seen: list[torch.dtype] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.net[0].weight.dtype)


def test_only_when_a_fit_begins_and_for_good() -> None:
    """Validated before in half precision, after in float32; made half precision again, the next fit upcasts again."""
    module, data = Validates().to(torch.bfloat16), batches(1)
    parameters = [*module.parameters()]
    trainer = quiet_trainer(plugins=[upcasting()], num_sanity_val_steps=0)
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    assert module.seen == [torch.bfloat16, torch.float32, torch.float32]
    assert module.dtype == torch.float32
    module.to(torch.bfloat16)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    assert module.seen[-1] == torch.float32
    if torch._has_compatible_shallow_copy_type(
        torch.ones(1), torch.ones(1, device=DEVICE)
    ):  # else torch makes new ones
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Look(L.Callback):
    """Keeps the weights after the checkpoint is loaded and before the first step."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = {name: value.cpu() for name, value in weights(pl_module).items()}


class Renamed(Toy):
    """Has other names in the checkpoint than in the module."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.register_state_dict_post_hook(self.to_checkpoint)
        self.register_load_state_dict_pre_hook(self.from_checkpoint)

    @staticmethod
    def to_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state["old." + name] = state.pop(name)

    @staticmethod
    def from_checkpoint(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)


class Partial(Toy):
    """Saves only one layer."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: v for name, v in super().state_dict(*args, **kwargs).items() if name.startswith("net.2")}


def saved(make: Any, path: Path) -> dict[str, Tensor]:
    trainer = fit(lambda: make().to(torch.bfloat16), upcasting())
    trainer.save_checkpoint(path)
    return weights(trainer)


@pytest.mark.parametrize("make", [lambda: Toy(adamw), Renamed, Partial])
def test_all_that_a_checkpoint_has_comes_back_unrounded(make: Any, tmp_path: Path) -> None:
    """It comes back before an optimizer or a hook of the fit reads it."""
    expected, look = saved(make, tmp_path / "a.ckpt"), Look()
    fit(lambda: make().to(torch.bfloat16), upcasting(), max_epochs=2, ckpt_path=tmp_path / "a.ckpt", callbacks=[look])
    assert_same(look.weights, expected)
    assert any((v != v.bfloat16().float()).any() for v in expected.values())


def test_a_checkpoint_of_half_precision_weights(tmp_path: Path) -> None:
    """Weights and optimizer state of a run without the argument go on in float32."""
    module = half()
    module.loss = lambda batch: module.net(batch.bfloat16()).float().square().mean()
    fit(module, AmpPrecision("fp32")).save_checkpoint(tmp_path / "a.ckpt")
    assert module.net[0].weight.dtype == torch.bfloat16
    look, expected = Look(), weights(module)
    trainer = fit(half(), upcasting(), max_epochs=2, ckpt_path=tmp_path / "a.ckpt", callbacks=[look])
    assert_same(look.weights, {name: value.float() for name, value in expected.items()})
    assert {v.dtype for v in trainer.optimizers[0].state_dict()["state"][0].values()} == {torch.float32}


@needs_averages
@pytest.mark.filterwarnings("ignore:The checkpoint was not created with WeightAveraging")
@pytest.mark.parametrize("make", [lambda: Toy(adamw), Partial])
def test_an_average_that_starts_from_a_checkpoint_without_one(make: Any, tmp_path: Path) -> None:
    expected, path = saved(make, tmp_path / "a.ckpt"), tmp_path / "a.ckpt"
    average = EMAWeightAveraging(update_starting_at_step=100)
    fit(lambda: make().to(torch.bfloat16), upcasting(), max_epochs=2, ckpt_path=path, callbacks=[average])
    assert average._average_model is not None
    assert_same(weights(average._average_model.module.cpu()), expected)
