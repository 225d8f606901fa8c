"""A user's mistake raises one error before the first batch: rule, value received, next step."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, batches, fit, quiet_trainer
from support.trainers import QUIET

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision, OverflowLocator, ScaleMonitor, doctor
from lightning_amp.casting import _precision_choice


def test_a_precision_the_device_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_precision_choice, "_autocast_runs", lambda device, dtype: False)
    module = Toy()
    module.training_step = lambda *args: pytest.fail("reached the first batch")
    with pytest.raises(ValueError, match="cannot run precision 'fp16'. It can run: 'fp32'"):
        fit(module, AmpPrecision("fp16"))


def test_plugin_and_precision() -> None:
    with pytest.raises(ValueError, match="Received both"):
        quiet_trainer(plugins=[AmpPrecision("bf16")], precision="bf16-mixed")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"callbacks": [ScaleMonitor]}, r"`callbacks` has the class `ScaleMonitor`: write `ScaleMonitor\(\)`"),
        ({"callbacks": [AmpPrecision("bf16")]}, r"is a plugin, not a callback: write `plugins=\[AmpPrecision"),
    ],
)
@pytest.mark.skipif(L.__version__ < "2.6", reason="Lightning 2.5 raises its own error before it reads `state_key`")
def test_a_class_or_the_wrong_list(kwargs: Any, says: str) -> None:
    with pytest.raises(Exception, match=says):
        L.Trainer(**QUIET | kwargs)


def test_callbacks_are_shown_with_their_arguments() -> None:
    assert str(ScaleMonitor(5, warn_below=None)) == "ScaleMonitor(log_every_n_steps=5, warn_below=None)"


def test_the_other_package() -> None:
    other = pytest.importorskip("pytorch_lightning")
    write = "write `from lightning_amp.pytorch_lightning import"
    plugin = AmpPrecision("bf16")
    for arguments in ({"plugins": [plugin]}, {"strategy": other.strategies.DDPStrategy(precision_plugin=plugin)}):
        with pytest.raises(TypeError, match=f"{write} AmpPrecision"):
            other.Trainer(accelerator="cpu", logger=False, **arguments)
    with pytest.raises(TypeError, match=f"{write} FabricAmpPrecision"):
        pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", plugins=[FabricAmpPrecision("bf16")])

    class Module(other.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...
        def configure_optimizers(self) -> None: ...

    old = L.__version__ < "2.6"  # it raises its own error before it calls the callback
    with pytest.raises(ValueError if old else TypeError, match="a parent" if old else f"{write} ScaleMonitor"):
        other.Trainer(**(QUIET | {"callbacks": [ScaleMonitor()], "accelerator": "cpu"})).fit(Module(), batches())
    with pytest.raises(TypeError, match=write):
        doctor(Module, L.LightningDataModule)
    with pytest.raises(ImportError, match="already uses `lightning_amp` with `lightning`"):
        importlib.import_module("lightning_amp.pytorch_lightning")


@pytest.mark.parametrize(
    "kwargs", [{"log_every_n_steps": 0}, {"log_every_n_steps": 1.5}, {"warn_below": -1.0}, {"warn_below": "1"}]
)
def test_scale_monitor(kwargs: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        ScaleMonitor(**kwargs)


@pytest.mark.parametrize("callback", [ScaleMonitor, OverflowLocator])
def test_a_folder_that_nobody_could_write_to(callback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loggers are known before the first batch, so the error comes before any history is lost."""
    with pytest.raises(ValueError, match=r"`dirpath` must be .* got 's4://bucket/run'. Protocol not known: s4"):
        callback(dirpath="s4://bucket/run")
    with pytest.raises(ValueError, match=r"`dirpath` must be .* or a URL as a string .*got .*s3:/bucket/run"):
        callback(dirpath=Path("s3://bucket/run"))
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"`dirpath` must be .* got 'gs://bucket/run'\. .*gcsfs"):
        callback(dirpath="gs://bucket/run")


def test_skip_nonfinite_is_a_bool() -> None:
    with pytest.raises(ValueError, match="`skip_nonfinite`"):
        AmpPrecision("bf16", skip_nonfinite=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", torch.bfloat16])
@pytest.mark.parametrize("scaler", [DynamicLossScaler(), torch.amp.GradScaler("cpu"), 128.0])
def test_a_scaler_where_none_is_used(precision: Any, scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"does not use a loss scaler.*leave `scaler` out"):
        AmpPrecision(precision, scaler=scaler)


@pytest.mark.parametrize("scaler", ["dynamic", -1.0, float("nan"), 0.0, object()])
def test_not_a_scaler(scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"scale"):
        AmpPrecision("fp16", scaler=scaler)
