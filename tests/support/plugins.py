"""The plugins that tests compare: ours and Lightning's own, with and without autocast."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import amp

from lightning_amp import AmpPrecision, DynamicLossScaler
from support.devices import DEVICE


class WithoutAutocast(AmpPrecision):
    """Our fp16 plugin in full precision. With scales that are powers of two, a run must equal fp32 exactly."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


class StockWithoutAutocast(MixedPrecision):
    """Lightning's own fp16 plugin in full precision, to show that a test can fail."""

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with torch.autocast(self.device, enabled=False):
            yield


STOCK_CACHES_CASTS = hasattr(amp, "_AutocastClearCacheOnExit")
"""Whether this Lightning has a change of its next release (its pull requests 21616 and 21436).

Its plugin then keeps one half-precision copy of a weight per step, so autograd adds up its gradients in half precision.
It also clips the gradients of fused optimizers in bf16.
"""


def scaled_fp32(**scaler: Any) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=DynamicLossScaler(**scaler))


def stock_fp32(**scaler: Any) -> MixedPrecision:
    return StockWithoutAutocast("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))


def stock(precision: str, **scaler: Any) -> MixedPrecision:
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", DEVICE)
    return MixedPrecision("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))
