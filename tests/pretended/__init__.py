"""A pretended accelerator, so that the branches for GPUs run on a machine without one.

`device.cpp` gives a CPU-only torch two devices that keep their memory on the host and run the CPU's kernels. Like real
devices, they have dispatch keys, a `device.type`, autocast, and threads of their own for backwards. They have a
current device, streams, events, generators, pinned memory and memory counts, and they raise these errors:

- tensors of two devices, or of the CPU and a device, in one operation;
- `.item()`, blocking copies, `nonzero` and masks as an index count as waits. They raise under
  `torch.cuda.set_sync_debug_mode("error")`, and while a graph is captured (`core().set_capturing(True)`);
- fresh memory is full of NaN, and so is pinned memory until the copy into it was waited for.

`LIGHTNING_AMP_PRETEND=cuda` makes it `torch.device("cuda")`, two "H100s"; `LIGHTNING_AMP_PRETEND=pretended` makes it
another device type, as MPS, XPU and NPU are. Each process that has `tests/pretended/site` on its `PYTHONPATH` then has
the device as soon as it imports torch. `python tests/pretended/build.py` compiles it, `make test-device` does all.

A test says what it needs beyond that with `@pytest.mark.needs(...)`, one of `MISSING`. A pass says nothing about
numbers or speed on a GPU, only about devices, waits and the names of functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

KINDS = ("cuda", "pretended")
KIND = os.environ.get("LIGHTNING_AMP_PRETEND", "")
"""Return the kind of device that this process pretends to have; empty: none."""

MISSING = {
    "sparse": "sparse tensors on the device",
    "quantized": "quantized tensors on the device",
    "gru": "the kernel of a GRU cell",
    "nccl": "NCCL",
    "inductor": "code that torch.compile generates",
    "fp8": "products in fp8",
    "forward AD": "derivatives in forward mode",
    "profiler": "what torch.profiler asks of a driver",
    "speed": "a speed that means anything",
}
"""Features of a real GPU that no pretended device has."""
MISSING_OF_ANOTHER_TYPE = {
    "accelerate": "a device that Accelerate finds",
    "parameters that stay": "`module.to(device)` that keeps its parameters, as for CUDA, MPS and XPU",
    "reused casts": "autocast's cache of casts, with which plain Fabric fails",
    "whole autocast": "an autocast that knows all operations of CUDA's, and that torch's own modules ask about",
}
"""Features of the pretended CUDA device that the pretended device of another type lacks."""


def what_it_lacks() -> dict[str, str]:
    """Return the requirements that the device of this process does not meet, and what each means."""
    return MISSING | (MISSING_OF_ANOTHER_TYPE if KIND == "pretended" else {})


def core() -> Any:
    """Return the compiled module: `counts()`, `reset_counts()`, `set_capturing(bool)`, `set_limit(index, bytes)`.

    Raises:
        RuntimeError: Nothing is pretended here.

    """
    boot = sys.modules.get("pretended_boot")
    if boot is None or boot.core is None:
        raise RuntimeError(why_not() or "torch is not imported yet")
    return boot.core


def why_not() -> str:
    """Return in one line why this process has no pretended device; empty if it has one."""
    if not KIND:
        return "LIGHTNING_AMP_PRETEND is not set"
    importlib.import_module("torch")  # the device is part of that module

    boot = sys.modules.get("pretended_boot")
    if boot is None:
        return "tests/pretended/site is not on PYTHONPATH"
    return boot.error
