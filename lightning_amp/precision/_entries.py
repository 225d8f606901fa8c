"""The entries of a checkpoint that hold the state of a loss scaler, of this package and of Lightning."""

from __future__ import annotations

from typing import Any

STOCK_KEY = "MixedPrecision"
"""Stock Lightning keeps its scaler under this key.

Our scaler is saved there too, so that a run can continue in stock Lightning.
"""

STOCK_FSDP_KEY = "FSDPPrecision"
"""The same for `FSDPStrategy`."""

_KEYS = ("AmpPrecision", "FSDPAmpPrecision", STOCK_KEY, STOCK_FSDP_KEY, "native_amp_scaling_state")


def find_entry(checkpoint: dict[str, Any]) -> str | None:
    """Return the key of the first entry that holds a scaler's state, from any plugin."""
    return next((key for key in _KEYS if checkpoint.get(key)), None)
