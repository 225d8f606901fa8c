"""Row 33: a plugin on a strategy that it is not for; the message names the one that is."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Toy, batches, fit, quiet_trainer
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)

from lightning_amp import AmpPrecision, FSDPAmpPrecision


class OnTheCPU(FSDPStrategy):
    """Lightning refuses the CPU for exactly the base of this class."""


def bare(strategy: type[Strategy]) -> Strategy:
    """One whose constructor wants packages or devices that are not here."""
    return strategy.__new__(strategy)


def test_fsdp_names_ours() -> None:
    for arguments in ({"strategy": OnTheCPU(), "plugins": [AmpPrecision("fp16")]},):
        with pytest.raises(TypeError, match=r"FSDP strategy.*for FSDP use `lightning_amp.FSDPAmpPrecision\('fp16'\)`"):
            quiet_trainer(devices=2, **arguments)
    with pytest.raises(TypeError, match=r"for FSDP use `lightning_amp.FSDPAmpPrecision\('bf16'\)`"):
        OnTheCPU(precision_plugin=AmpPrecision("bf16"))


def test_fsdp_takes_ours() -> None:
    plugin = FSDPAmpPrecision("fp16")
    trainer = quiet_trainer(devices=2, strategy=OnTheCPU(), plugins=[plugin])
    assert trainer.precision_plugin is plugin
    assert trainer.strategy.mixed_precision_config == plugin.mixed_precision_config


@pytest.mark.parametrize("kind", [XLAStrategy, SingleDeviceXLAStrategy])
@pytest.mark.parametrize("plugin", [AmpPrecision("bf16"), FSDPAmpPrecision("bf16")])
def test_xla(kind: type[Strategy], plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "torch_xla", __import__("types")
    )  # as it is where such a strategy is
    with pytest.raises(TypeError, match=r"XLA strategy.*leave the plugin out.*precision='bf16-true'.*`XLAPrecision`"):
        bare(kind).precision_plugin = plugin


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
    ],
)
def test_the_others_are_found_when_the_trainer_attaches(plugin: Any, kind: type[Strategy], message: str) -> None:
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = bare(kind)
    module = Toy()
    module.trainer = trainer
    with pytest.raises(TypeError, match=message):
        plugin.convert_module(module)  # what each of these strategies calls first


def test_one_device_names_ours() -> None:
    message = (
        r"`FSDPAmpPrecision\('fp16'\)` cannot be used with `SingleDeviceStrategy`: use `lightning_amp.AmpPrecision"
    )
    with pytest.raises(TypeError, match=message):
        fit(Toy, FSDPAmpPrecision("fp16"), batches(1))


def test_a_users_subclass_is_told_our_name() -> None:
    class Mine(AmpPrecision): ...

    with pytest.raises(
        TypeError, match=r"found Mine\('fp16'\).* \(for FSDP use `lightning_amp.FSDPAmpPrecision\('fp16'\)"
    ):
        OnTheCPU(precision_plugin=Mine("fp16"))


def test_a_plugin_at_work_is_only_its_name() -> None:
    """The hint is for messages before a Trainer attached; `print` and a run are spared."""
    plugin = AmpPrecision("fp32")
    seen: list[str] = []

    class Look(Toy):
        def on_train_start(self) -> None:
            seen.append(f"{plugin}")

    assert "for FSDP use" in f"{plugin}"
    fit(Look, plugin, batches(1))
    assert seen == [str(plugin)]
    assert "for FSDP use" not in str(plugin)
    sharded = FSDPAmpPrecision()
    assert f"{sharded}" == str(sharded)
