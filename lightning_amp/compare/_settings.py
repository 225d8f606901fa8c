"""Settings of torch for the whole process, which another process gets too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp.tracing import fp32_switches


def process_settings() -> dict[str, Any]:
    """Return the settings of this process that change the speed or the bits of torch: threads, TF32 and others.

    A script may set them at its top, so its runs need the same settings in other processes. The states of random
    generators are not included.
    """
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "fp32_precision": [switch.fp32_precision for switch in fp32_switches()],
    }


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Set the settings of another process."""
    if torch.get_num_threads() != settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["deterministic_warn_only"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    for switch, wanted in zip(fp32_switches(), settings["fp32_precision"], strict=True):
        if switch.fp32_precision != wanted:
            switch.fp32_precision = wanted
