"""Simulate CPUs: the facts about a CPU that the package reads.

No test may depend on the real CPU. `LIGHTNING_AMP_TEST_MACHINE=bf16-slow pytest ...` runs the tests on another one of
`MACHINES`, and `real` on the real CPU. A test about one machine uses the fixture `on_machine`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

MACHINES = {
    "bf16-fast": ("avx512_bf16", "amx_bf16"),
    "bf16-slow": ("avx512_bf16", "avx512_fp16"),  # trains in bf16 at 0.3 to 0.7 of the speed in fp32
    "fp16-native": ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"),
    "amd": ("avx512_bf16",),
    "arm": ("bf16", "sve_bf16"),
    "none": (),
}
"""The instructions of each CPU."""

NAME = os.environ.get("LIGHTNING_AMP_TEST_MACHINE", "bf16-fast")
if NAME not in (*MACHINES, "real"):
    raise ValueError(f"`LIGHTNING_AMP_TEST_MACHINE` must be one of {[*MACHINES, 'real']}; got {NAME!r}.")


@cache
def _real() -> tuple[Any, Any]:
    from lightning_amp._compat import _torch
    from lightning_amp.casting import _precision_choice

    return _torch.cpu_capabilities, _precision_choice.is_amd


def move_to(name: str) -> None:
    """Simulate one of `MACHINES` in this process from now on, or none with `real`."""
    from lightning_amp._compat import _torch
    from lightning_amp.casting import _precision_choice

    capabilities, is_amd = _real()
    if name != "real":
        instructions = MACHINES[name]
        capabilities, is_amd = lambda: {"avx2": True, **dict.fromkeys(instructions, True)}, lambda: name == "amd"
    _torch.cpu_capabilities, _precision_choice.is_amd = capabilities, is_amd
