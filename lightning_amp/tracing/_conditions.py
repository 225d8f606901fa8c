"""Give a second run of a step the random numbers of the first, and compute fp32 without reduced precision."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final


@final
class RandomState(NamedTuple):
    """The states of the global random generators of Python, NumPy, torch and the accelerator."""

    python: Any
    numpy: Any
    cpu: Tensor
    accelerator: Any

    @classmethod
    def capture(cls, device_type: str) -> RandomState:
        """Copy the states (this takes some 30 us; it does not wait for the device)."""
        numpy: Any = sys.modules.get("numpy")  # if NumPy is not imported, no code draws from it
        return cls(
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            cpu=torch.get_rng_state(),
            accelerator=_accelerator_random(device_type, "get_rng_state"),
        )

    def restore(self, device_type: str) -> None:
        """Write the states back."""
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            _accelerator_random(device_type, "set_rng_state", self.accelerator)


def _accelerator_random(device_type: str, name: str, *args: Any) -> Any:
    if device_type == "cpu":
        return None
    backend = torch.get_device_module(device_type)
    # All devices of the process where the backend supports it: user code may draw on any of them.
    return getattr(backend, f"{name}_all", getattr(backend, name, lambda *_: None))(*args)


@contextmanager
def paired_random(device_type: str, start: RandomState | None = None) -> Generator[None]:
    """Begin at the random state `start` (default: the current one), and restore the current one at the end."""
    found = RandomState.capture(device_type)
    if start is not None:
        start.restore(device_type)
    try:
        yield
    finally:
        found.restore(device_type)


def fp32_switches() -> tuple[Any, ...]:
    """Return the objects with an `fp32_precision`: matrix products, convolutions and recurrent layers, by library."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    return backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn


def reduces_fp32(device_type: str) -> bool:
    """Return whether torch may compute fp32 matrix products on this type of device in TF32 or bf16 now."""
    return fp32_switches()[3 if device_type == "cpu" else 0].fp32_precision not in ("ieee", "none")


@contextmanager
def full_precision(device_type: str) -> Generator[None]:
    """Compute in true fp32: without autocast, and without TF32 or bf16 inside fp32 products."""
    found: list[tuple[Any, str]] = []
    try:
        for switch in fp32_switches():
            precision = switch.fp32_precision
            if precision not in ("ieee", "none"):
                found.append((switch, precision))
                switch.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for switch, precision in found:
            # Reading a switch resolves inheritance, so a switch that inherited its value must be made to inherit it
            # again.
            switch.fp32_precision = "none"
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
