"""Simulate CPUs: the facts that the package reads, and the ratios that its probe would measure.

No test may depend on the real CPU. `LIGHTNING_AMP_TEST_MACHINE=bf16-slow pytest ...` runs the tests on another one of
`MACHINES`, and `real` on the real CPU. A test about one machine uses the fixture `on_machine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from typing_extensions import final


@final
@dataclass(frozen=True)
class Machine:
    """A CPU: its instructions, and its speed in half precision relative to fp32."""

    instructions: tuple[str, ...]
    speed: dict[str, float]

    def capabilities(self) -> dict[str, bool]:
        """Return the entries of `torch.cpu.get_capabilities` that matter."""
        return {"avx2": True, **dict.fromkeys(self.instructions, True)}

    def measure(self, precision: str, kind: str, **_: Any) -> Any:
        """Return the result of the probe, with the noise of a quiet machine."""
        from lightning_amp.casting import _cpu_speed

        now = 0.0
        noise = iter([1.0, 1.02, 0.99, 1.01, 0.98] * 100)

        def run(seconds: float) -> None:
            nonlocal now
            now += seconds * next(noise)

        half, full = partial(run, 1e-3 / self.speed[f"{precision} {kind}"]), partial(run, 1e-3)
        return _cpu_speed.compare_runs(half, full, most_s=0.1, clock=lambda: now)


def _speed(bf16: float, bf16_convolutions: float, fp16: float, fp16_convolutions: float) -> dict[str, float]:
    return {
        "bf16 products": bf16, "bf16 convolutions": bf16_convolutions,
        "fp16 products": fp16, "fp16 convolutions": fp16_convolutions,
    }  # fmt: skip


MACHINES = {
    "bf16-fast": Machine(("avx512_bf16", "amx_bf16"), _speed(10, 3, 0.1, 0.2)),
    "bf16-slow": Machine(("avx512_bf16", "avx512_fp16"), _speed(0.56, 0.2, 0.97, 0.01)),
    "fp16-native": Machine(("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"), _speed(8, 2.5, 8, 1.5)),
    "none": Machine((), _speed(0.1, 0.2, 0.1, 0.1)),
}
"""The ratios of `bf16-slow` were measured on an Intel CPU with AVX512-BF16 and AVX512-FP16, but without AMX."""

NAME = os.environ.get("LIGHTNING_AMP_TEST_MACHINE", "bf16-fast")
if NAME not in (*MACHINES, "real"):
    raise ValueError(f"`LIGHTNING_AMP_TEST_MACHINE` must be one of {[*MACHINES, 'real']}; got {NAME!r}.")


@cache
def _real() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from lightning_amp._compat import _torch
    from lightning_amp.casting import _cpu_speed

    return _torch.cpu_capabilities, _cpu_speed.measure_cpu_speed


def move_to(name: str) -> None:
    """Simulate one of `MACHINES` in this process from now on, or none with `real`."""
    from lightning_amp._compat import _torch
    from lightning_amp.casting import _cpu_speed

    capabilities, measure = _real()
    if name != "real":
        capabilities, measure = MACHINES[name].capabilities, MACHINES[name].measure
    _torch.cpu_capabilities, _cpu_speed.measure_cpu_speed = capabilities, measure  # type: ignore[assignment]
    _cpu_speed.cpu_speed.cache_clear()
