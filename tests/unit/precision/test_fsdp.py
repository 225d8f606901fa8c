"""Row 29: `FSDPAmpPrecision` in one process; `tests/multi_rank/test_fsdp.py` has several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision

from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision


def test_nothing_of_lightnings_own_plugin_is_left() -> None:
    own = {name: value for name, value in vars(FSDPPrecision).items() if callable(value) or isinstance(value, property)}
    assert {"forward_context", "convert_input", "mixed_precision_config"} <= own.keys()
    inherited = [name for name, value in own.items() if getattr(FSDPAmpPrecision, name) is value]
    assert inherited == []
    plugin = FSDPAmpPrecision("fp16")
    assert isinstance(plugin, MixedPrecision)
    for context in (plugin.tensor_init_context(), plugin.module_init_context()):
        with context:
            assert torch.get_default_dtype() == torch.float32
    half = torch.ones(2, dtype=torch.float16)
    assert plugin.convert_output(half) is half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "auto"])
def test_only_the_reduction_has_a_dtype(precision: str, dtype: torch.dtype) -> None:
    config = FSDPAmpPrecision(precision, reduce_dtype=dtype).mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (None, dtype, None)
    assert FSDPAmpPrecision(precision).mixed_precision_config.reduce_dtype == torch.float32
    stock = FSDPPrecision("bf16-mixed").mixed_precision_config
    assert {stock.reduce_dtype, stock.buffer_dtype} == {torch.bfloat16}


@pytest.mark.parametrize("value", [torch.float64, "bf16", None, 16])
def test_another_reduction(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`reduce_dtype` must be one of `torch.float32`, `torch.float16`, `torch.bfl"):
        FSDPAmpPrecision("fp16", reduce_dtype=value)


def test_a_scaler_of_ones_own() -> None:
    scaler = DynamicLossScaler(128.0)
    assert FSDPAmpPrecision("fp16", scaler=scaler).scaler is scaler
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu"))


def test_lightnings_own_reads_ours_and_ours_reads_it() -> None:
    plugin = FSDPAmpPrecision("fp16", scaler=DynamicLossScaler(128.0))
    checkpoint: dict[str, Any] = {"FSDPAmpPrecision": plugin.state_dict()}
    plugin.on_save_checkpoint(checkpoint)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(checkpoint["FSDPPrecision"])
    assert theirs.get_scale() == 128.0
    for key in ("FSDPPrecision", "MixedPrecision", "AmpPrecision", "native_amp_scaling_state"):
        again = FSDPAmpPrecision("fp16")
        again.on_load_checkpoint({key: checkpoint["FSDPPrecision"]})
        assert again.scaler.get_scale() == 128.0
    other = AmpPrecision("fp16")
    other.on_load_checkpoint({"FSDPAmpPrecision": checkpoint["FSDPAmpPrecision"]})
    assert other.scaler.get_scale() == 128.0
