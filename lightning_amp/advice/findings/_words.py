"""Phrases that several findings share."""

from __future__ import annotations

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.measure import SpeedComparison, times_as_fast


def in_ms(seconds: float) -> str:
    """Write a time in milliseconds: `2.5 ms`."""
    return f"{rounded(seconds * 1e3)} ms"


def duration(seconds: float) -> str:
    """Write a time in milliseconds, or in seconds if it is one or more: `610 ms`, `61 s`."""
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
    """Write which precision to use, and why; empty if none is recommended."""
    if decision.use is None:
        return ""
    text = f'Use `AmpPrecision("{decision.use}")`'
    if decision.use != FP32 and decision.speed is not None:
        what = "step is" if decision.basis == "step" else "matrix products are"
        text += f": its {what} {in_fp32(decision.speed)}"
    return f"{text}."
