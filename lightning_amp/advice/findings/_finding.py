"""`Finding`: one thing that the doctor found; `Decision`: the precision that it recommends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

from lightning_amp._text import rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import AS_IT_IS, IN_FP32, Step
from lightning_amp.measure import SpeedComparison

Severity = Literal["error", "warning", "note", "ok"]
FP32 = "fp32"
WORTH = 1.05
"""A gain below 5 % is no warning, however sure it is."""


@final
@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found.

    Attributes:
        severity: `"error"`: mixed precision cannot help like this. `"warning"`: a change gains something, and the gain
            was measured. `"note"`: worth knowing. `"ok"`: nothing is wrong.
        code: A stable name in kebab case, for scripts.
        message: One or two sentences with the measured number.
        action: The next thing to do; empty if there is none.
        share: The affected share of the time or memory of a step, from 0 to 1. Larger is worse.

    """

    severity: Severity
    code: str
    message: str
    action: str = ""
    share: float = 0.0

    @property
    def is_problem(self) -> bool:
        """Return whether there is something to do."""
        return self.severity in ("error", "warning")


@final
@dataclass(frozen=True)
class Decision:
    """The precision recommended for speed. The headline and every finding follow from it.

    Attributes:
        looked_at: The precision that the report examines.
        use: The recommended precision; `None` if the measurements do not decide.
        speed: The speed, relative to fp32, of the step or of matrix products, on which this rests.

    """

    looked_at: str
    use: str | None
    speed: SpeedComparison | None = None


def decide(machine: Machine, looked_at: str, step: Step | None = None) -> Decision:
    """Recommend a precision: by the user's own step if there is one, else by matrix products."""
    if step is not None:
        speed, products = step.speed(AS_IT_IS, IN_FP32), machine.speed(looked_at)
        if speed is None or looked_at == FP32:
            return Decision(looked_at, None)
        use = {"faster": looked_at, "slower": FP32}.get(speed.claim)
        if speed.claim in ("undecided", "one run") and speed.ratio < 1 and products and products.claim == "slower":
            use = FP32  # the rounds do not decide, and products agree with them
        return Decision(looked_at, use, speed)
    runs = [found.name for found in machine.formats if found.support != "missing"]
    mixed = [name for name in dict.fromkeys((machine.precision, looked_at, "bf16", "fp16")) if name in runs]
    is_open = False
    for name in (name for name in mixed if name != FP32):
        found, speed = machine.format(name), machine.speed(name)
        if speed is not None and speed.claim == "faster":
            return Decision(looked_at, name, speed)
        native = found is not None and found.support == "native"
        is_open = is_open or (native and (speed is None or speed.decided_ratio is None))
    return Decision(looked_at, None if is_open else FP32, machine.speed(looked_at))


# -- words -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Write a time in milliseconds, or in seconds if it is one or more: `610 ms`, `61 s`."""
    return f"{rounded(seconds * 1e3)} ms" if seconds < 1 else f"{rounded(seconds)} s"


def in_fp32(speed: SpeedComparison) -> str:
    """Write a comparison with fp32: `3.8x as slow as in fp32 (3.5 to 4.1)`, `as fast as in fp32 within 5 %`."""
    words = speed.in_words("in fp32")
    return f"{words} of fp32's" if speed.claim == "undecided" and speed.interval else words


def graded(share: float, warning: float) -> Severity:
    """Return `"warning"` if a share of a step reaches the bound, else `"note"`."""
    return "warning" if share >= warning else "note"


def is_worth_it(found: SpeedComparison | None) -> bool:
    """Return whether a change is shown to be faster, and by 5 % or more."""
    return found is not None and found.claim == "faster" and found.ratio >= WORTH


def use_instead(decision: Decision) -> str:
    """Write which precision to use, if it is another one than the report examines."""
    is_other = decision.use is not None and decision.use != decision.looked_at
    return f'Use `AmpPrecision("{decision.use}")`.' if is_other else ""
