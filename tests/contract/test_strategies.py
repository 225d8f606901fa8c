"""Row 33: a plugin on a strategy that it does not support raises, and the message names the plugin that does."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)
from multi_rank.fsdp_models import OnTheCPU
from support import FEATURES, Toy, batches, fit, quiet_trainer
from torch import nn

import lightning_amp
from lightning_amp import AmpPrecision, FSDPAmpPrecision


def bare(strategy: type[Strategy]) -> Strategy:
    """A strategy whose constructor needs packages or devices that are missing here."""
    return strategy.__new__(strategy)


def test_fsdp_takes_ours() -> None:
    plugin = FSDPAmpPrecision("fp16")
    trainer = quiet_trainer(devices=2, strategy=OnTheCPU(), plugins=[plugin])
    assert trainer.precision_plugin is plugin
    assert trainer.strategy.mixed_precision_config == plugin.mixed_precision_config


class Mine(AmpPrecision):
    """A strategy that a user wrote."""


@pytest.mark.parametrize(
    ("plugin", "kind", "message"),
    [
        (
            AmpPrecision("fp16"),
            DeepSpeedStrategy,
            r"`AmpPrecision\('fp16'\)` cannot be .*precision='bf16-mixed'.*`DeepSp",
        ),
        (
            FSDPAmpPrecision("bf16"),
            DeepSpeedStrategy,
            "DeepSpeedStrategy`: .*leave the plugin out.*`DeepSpeedPrecision`",
        ),
        (FSDPAmpPrecision(), ModelParallelStrategy, r"use `lightning_amp.AmpPrecision\('auto'\)`, .*FSDP2"),
        (AmpPrecision("fp16"), FSDPStrategy, r"use `lightning_amp.FSDPAmpPrecision\('fp16'\)`"),
        (Mine("fp16"), FSDPStrategy, r"`Mine\('fp16'\)` cannot be .*use `lightning_amp.FSDPAmpPrecision\('fp16'\)`"),
        (AmpPrecision("fp8"), FSDPStrategy, "For fp8 with sharded parameters use FSDP2"),
        (AmpPrecision("bf16"), XLAStrategy, "leave the plugin out.*precision='bf16-true'.*`XLAPrecision`"),
        (FSDPAmpPrecision("bf16"), SingleDeviceXLAStrategy, "leave the plugin out.*`XLAPrecision`"),
    ],
)
def test_the_others_are_found_when_the_trainer_attaches(plugin: Any, kind: type[Strategy], message: str) -> None:
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = bare(kind)
    module = Toy()
    module.trainer = trainer
    with pytest.raises(TypeError, match=message):
        plugin.convert_module(module)  # the first call that each of these strategies makes


def test_one_device_names_ours() -> None:
    message = (
        r"`FSDPAmpPrecision\('fp16'\)` cannot be used with `SingleDeviceStrategy`: use `lightning_amp.AmpPrecision"
    )
    with pytest.raises(TypeError, match=message):
        fit(Toy, FSDPAmpPrecision("fp16"), batches(1))


@pytest.mark.parametrize("plugin", [AmpPrecision("fp32"), FSDPAmpPrecision()])
def test_a_plugin_as_text_is_its_name(plugin: AmpPrecision) -> None:
    assert f"{plugin}" == str(plugin) == repr(plugin)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.line(batch)


def train_in_fabric(module: nn.Module, **kwargs: Any) -> torch.Tensor:
    fabric = L.Fabric(accelerator="cpu", devices=1, **kwargs)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for batch in batches(4):
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    return next(module.parameters()).detach()


@pytest.mark.parametrize("plugin", [AmpPrecision("fp16"), AmpPrecision("fp32"), FSDPAmpPrecision("bf16")])
@pytest.mark.parametrize("module", [lambda: nn.Linear(FEATURES, 1), Line])
def test_fabric_is_told_what_to_use(plugin: AmpPrecision, module: Any) -> None:
    arguments = re.escape(repr(plugin).removeprefix(type(plugin).__name__))
    text = rf"`{re.escape(repr(plugin))}` is a plugin for `L.Trainer`, .*`L.Fabric\(.*FabricAmpPrecision{arguments}"
    with pytest.raises(TypeError, match=text):
        train_in_fabric(module(), plugins=[plugin])
    with pytest.raises(TypeError, match=text):  # the strategy was not set up
        L.Fabric(accelerator="cpu", plugins=[plugin]).backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_what_fabric_is_told_works(precision: str) -> None:
    with pytest.raises(TypeError) as caught:
        train_in_fabric(nn.Linear(FEATURES, 1), plugins=[AmpPrecision(precision)])
    (advice,) = re.findall(r"`(L\.Fabric.*?)`", str(caught.value))
    names = {"L": SimpleNamespace(Fabric=dict), "lightning_amp": lightning_amp}
    arguments = eval(advice, names)
    assert train_in_fabric(nn.Linear(FEATURES, 1), **arguments).isfinite().all()
