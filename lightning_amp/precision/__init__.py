"""The Lightning adapter: precision plugins."""

from lightning_amp.precision._amp import AmpPrecision

__all__ = ["AmpPrecision"]
