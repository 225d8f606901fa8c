"""The plugins that are compared: ours and Lightning's own, with and without autocast."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_amp import AmpPrecision, DynamicLossScaler
from support.devices import DEVICE


class WithoutAutocast(AmpPrecision):
    """The whole fp16 machinery, scaling included, in full precision: with powers of two it must equal fp32 exactly."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


class StockWithoutAutocast(MixedPrecision):
    """Lightning's own fp16 plugin, likewise; to show that a test can fail."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


def scaled_fp32(**scaler: Any) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=DynamicLossScaler(**scaler))


def stock_fp32(**scaler: Any) -> MixedPrecision:
    return StockWithoutAutocast("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))


def stock(precision: str, **scaler: Any) -> MixedPrecision:
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", DEVICE)
    return MixedPrecision("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))
