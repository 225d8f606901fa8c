"""The Lightning adapter: precision plugins, and the functions that a step calls on them. Read `_amp.py` first."""

from lightning_amp.casting import fp32_region
from lightning_amp.precision._amp import AmpPrecision
from lightning_amp.precision._any_plugin import scaled_grad, unscale_
from lightning_amp.precision._fabric import FabricAmpPrecision
from lightning_amp.precision._fsdp import FSDPAmpPrecision

__all__ = ["AmpPrecision", "FSDPAmpPrecision", "FabricAmpPrecision", "fp32_region", "scaled_grad", "unscale_"]
