"""Shared parts of the two models of images."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.headline.models._model import Batch, Size, library

NO_FP8 = "its products are convolutions, and fp8 is for linear layers"


def torchvision() -> Any:
    """Return torchvision; `None` if it is not installed, or does not fit this torch."""
    try:
        return library("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: a build for another torch
        return None


def images(size: Size, num_classes: int) -> Batch:
    """Return random images, with the channels last, and labels."""
    pixels = torch.rand(size.batch, 3, size.length, size.length).to(memory_format=torch.channels_last)
    return {"pixel_values": pixels, "labels": torch.randint(num_classes, (size.batch,))}
