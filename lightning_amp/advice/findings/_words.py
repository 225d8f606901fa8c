"""Phrases that several findings share."""

from __future__ import annotations

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.measure import SpeedComparison


def in_ms(seconds: float) -> str:
    """Write a time in milliseconds: `2.5 ms`."""
    return f"{rounded(seconds * 1e3)} ms"


def duration(seconds: float) -> str:
    """Write a time in milliseconds, or in seconds if it is one or more: `610 ms`, `61 s`."""
    return in_ms(seconds) if seconds < 1 else f"{rounded(seconds)} s"


def in_fp32(speed: SpeedComparison) -> str:
    """Write a comparison with fp32: `3.8x as slow as in fp32 (3.5 to 4.1)`, `as fast as in fp32 within 5 %`."""
    words = speed.in_words("in fp32")
    return f"{words} of fp32's" if speed.claim == "undecided" and speed.interval else words


def recommendation(decision: Decision) -> str:
    """Write which precision to use, and why; empty if none is recommended."""
    if decision.use is None:
        return ""
    text = f'Use `AmpPrecision("{decision.use}")`'
    if decision.use != FP32 and decision.speed is not None:
        what = "step is" if decision.basis == "step" else "matrix products are"
        text += f": its {what} {in_fp32(decision.speed)}"
    return f"{text}."
