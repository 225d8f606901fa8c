"""The device of the tests, flags on a pretended device, and counted or forbidden waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any, Literal

import lightning as L
import pretended
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = os.environ.get("LIGHTNING_AMP_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def flags_on_a_device() -> Generator[None, None, None]:
    """Make the CPU take a GPU's path. Without this the host reads each flag, since on the CPU that costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_amp.scaling._scalars.in_host_memory", lambda scalar: False)
        yield


class CountReads(TorchDispatchMode):
    """Counts how often the host reads a scalar with `.item()`, or copies a tensor to another device.

    On a GPU, the host waits for each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._local_scalar_dense.default
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].device.type != out.device.type
        return out


class Casts(TorchDispatchMode):
    """Notes the shape of each tensor that is cast to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (torch.bfloat16, torch.float16):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def set_sync_mode(mode: Literal["default", "warn", "error"]) -> None:
    """Set the effect of a wait for the device, on a GPU or on a pretended device of any type."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)
    else:
        pretended.core().set_sync_mode(("default", "warn", "error").index(mode))


class ForbidSync(L.Callback):
    """Raises if anything waits for the device during a batch, from the `first` one on."""

    def __init__(self, first: int = 2) -> None:
        self.first = first

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.first:
            set_sync_mode("error")

    def on_train_batch_end(self, *args: Any) -> None:
        set_sync_mode("default")

    def on_exception(self, *args: Any) -> None:
        set_sync_mode("default")
