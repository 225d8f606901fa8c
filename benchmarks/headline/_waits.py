"""Count how often the host waits for the device."""

from __future__ import annotations

import warnings

import torch
from typing_extensions import final


@final
class SyncWarnings:
    """Counts waits by the warnings of `torch.cuda.set_sync_debug_mode("warn")`, which CUDA gives for each one."""

    def __init__(self) -> None:
        self._context: warnings.catch_warnings[list[warnings.WarningMessage]] | None = None
        self._caught: list[warnings.WarningMessage] | None = None

    def start(self) -> None:
        """Start the count. Other warnings are swallowed."""
        self._context = warnings.catch_warnings(record=True)
        self._caught = self._context.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> int | None:
        """Return the count; `None` if nothing was counted."""
        if self._context is None:
            return None
        torch.cuda.set_sync_debug_mode("default")
        self._context.__exit__(None, None, None)
        self._context = None
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in self._caught or ())
