"""`Decision`: the one recommendation of a report. The verdict and every finding follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

from lightning_amp.advice._gains import speed_up
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Step
from lightning_amp.measure import SpeedComparison

FP32 = "fp32"


@final
@dataclass(frozen=True)
class Decision:
    """The precision recommended for speed, and the measurement behind the recommendation.

    Attributes:
        looked_at: The precision that the report examines.
        use: The recommended precision; `None` if the measurements do not decide.
        basis: `"step"`: the user's own step was timed against fp32. `"products"`: matrix products were timed against
            fp32. `"support"`: only fp32 has instructions here. `"nothing"`: neither was measured.
        speed: The speed of the step or the products in `use`; the speed in `looked_at` if `use` is fp32 or `None`.

    """

    looked_at: str
    use: str | None
    basis: Literal["step", "products", "support", "nothing"]
    speed: SpeedComparison | None = None

    @property
    def advises_against(self) -> bool:
        """Return whether a precision other than `looked_at` is recommended."""
        return self.use is not None and self.use != self.looked_at


def decide(machine: Machine, looked_at: str, step: Step | None = None) -> Decision:
    """Recommend a precision: by the user's own step if there is one, else by matrix products."""
    if step is None:
        return _by_products(machine, looked_at)
    speed = speed_up(step) if looked_at != FP32 else None
    if speed is None:
        return Decision(looked_at, None, "nothing")
    found, products = machine.format(looked_at), machine.speed(looked_at)
    emulated = found is not None and found.support == "emulated"
    # products decide if they agree with the step
    if speed.claim == "one run" or (speed.claim == "undecided" and emulated):
        agrees = products is not None and products.claim == "slower" and speed.ratio < 1
        return Decision(looked_at, FP32, "products", products) if agrees else Decision(looked_at, None, "step", speed)
    use = {"faster": looked_at, "slower": FP32}.get(speed.claim)
    return Decision(looked_at, use, "step", speed)


def _by_products(machine: Machine, looked_at: str) -> Decision:
    candidates = mixed_formats(machine)
    for name in candidates:
        speed = machine.speed(name)
        if speed is not None and speed.claim == "faster":
            return Decision(looked_at, name, "products", speed)
    open_ones = [name for name in candidates if _is_open(machine, name)]
    name = next(iter([*open_ones, *(n for n in (looked_at, *candidates) if machine.speed(n) is not None)]), looked_at)
    speed = machine.speed(name)
    if open_ones:
        return Decision(looked_at, None, "nothing" if speed is None else "products", speed)
    slow = speed is not None and speed.claim in ("slower", "same")
    return Decision(looked_at, FP32, "products" if slow else "support", speed)


def mixed_formats(machine: Machine) -> list[str]:
    """Return the formats of mixed precision that run here, beginning with the choice of `auto`."""
    runs = [found.name for found in machine.formats if found.support != "missing"]
    return [name for name in dict.fromkeys((machine.precision, "bf16", "fp16")) if name in runs and name != FP32]


def _is_open(machine: Machine, name: str) -> bool:
    """Return whether a format has instructions but measurements do not decide how fast its products are."""
    found, speed = machine.format(name), machine.speed(name)
    has_instructions = found is not None and found.support in ("native", "partial")
    return has_instructions and (speed is None or speed.decided_ratio is None)
