"""Undo a skipped step for schedules, averaged weights and buffers. Read `_protection.py` first."""

from lightning_amp.skipped_steps._kept_buffers import (
    BufferPlace,
    KeptBuffers,
    matching_places,
    norm_places,
)
from lightning_amp.skipped_steps._protection import SkipProtection

__all__ = [
    "BufferPlace",
    "KeptBuffers",
    "SkipProtection",
    "matching_places",
    "norm_places",
]
