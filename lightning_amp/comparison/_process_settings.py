"""Switches of torch that hold for a whole process: an arm has those of the process that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_amp.tracing import fp32_switches


def process_settings() -> dict[str, Any]:
    """Return the number of threads, TF32 and what else changes how fast, and in which bits, torch computes.

    A script sets them at its top, and a run by hand has them. Random generators are no settings.
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
    """Set what :func:`process_settings` returned, where it is not so already."""
    own = process_settings()
    if own["num_threads"] != settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    if own["default_dtype"] != settings["default_dtype"]:
        torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    if settings["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=settings["deterministic_warn_only"])
    for name in ("benchmark", "deterministic"):
        if own[f"cudnn_{name}"] != settings[f"cudnn_{name}"]:
            setattr(torch.backends.cudnn, name, settings[f"cudnn_{name}"])
    for switch, mine, wanted in zip(fp32_switches(), own["fp32_precision"], settings["fp32_precision"], strict=True):
        if mine != wanted:
            switch.fp32_precision = wanted
