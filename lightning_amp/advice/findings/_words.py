"""Words that several findings share."""

from __future__ import annotations

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.advice._gains import is_worth_it, measured, most_gain
from lightning_amp.advice._record import Label, Step
from lightning_amp.measure import SpeedComparison, times_as_fast


def in_ms(seconds: float) -> str:
    """Write a time in milliseconds: `2.5 ms`."""
    return f"{rounded(seconds * 1e3)} ms"


def duration(seconds: float) -> str:
    """Write a time in milliseconds, from a second on in seconds: `610 ms`, `61 s`."""
    return in_ms(seconds) if seconds < 1 else f"{rounded(seconds)} s"


def in_fp32(speed: SpeedComparison) -> str:
    """Write a comparison with fp32: `3.8x as slow (3.5 to 4.1) as in fp32`, `as fast as in fp32, within 5 %`."""
    match speed.claim:
        case "same":
            return "as fast as in fp32, within 5 %"
        case "undecided":
            return f"{speed} of fp32's" if speed.interval else str(speed)
        case "one run":
            return f"{times_as_fast(speed.ratio)} as in fp32, one run of each"
        case _:
            return f"{speed} as in fp32"


def recommendation(decision: Decision) -> str:
    """Write what to use, and why; empty if nothing is recommended."""
    if decision.use is None:
        return ""
    text = f'Use `AmpPrecision("{decision.use}")`'
    if decision.use != FP32 and decision.speed is not None:
        what = "step is" if decision.basis == "step" else "matrix products are"
        text += f": its {what} {in_fp32(decision.speed)}"
    return f"{text}."


def tried(step: Step, label: Label, found: SpeedComparison | None) -> str:
    """Say what a change gains: as measured, or at most, where its measurement was noise."""
    if found is not None:
        return f"with `{label}`, tried here: {found}"
    if measured(step, label) is None:
        return f"`{label}` was not timed"
    most = times_as_fast(most_gain(step, label))
    return f"`{label}` can make a step {most} at most, and its rounds show more, which is noise"


def left(found: SpeedComparison | None, what: str) -> str:
    """Say what follows from a gain that is not worth it."""
    if found is None or found.claim in ("undecided", "one run"):
        return f"Undecided. Time {what} by itself, on a quiet machine."
    return f"Leave it as it is: {what} gains {'little' if found.claim == 'faster' else 'less than 5 %'} here."


def saved(found: SpeedComparison | None) -> float:
    """Return which share of a step a change saves; 0 if it is not worth it."""
    return 1 - 1 / found.ratio if found is not None and is_worth_it(found) else 0.0
