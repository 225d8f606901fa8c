"""`memory-not-lower`: the peak is not lower than in fp32, and no other finding about memory says why."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import memory
from lightning_amp.advice._decision import FP32
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule
from lightning_amp.advice.findings._large_logits import LARGE_LOGITS
from lightning_amp.advice.findings._state_dominates import STATE_DOMINATES, peak_matters, state_bytes


def _find(seen: Seen) -> Iterator[Finding]:
    found, full = seen.step.memory, seen.step.fp32_memory
    if full is None or seen.step.precision == FP32 or not peak_matters(seen.step, seen.machine):
        return
    if found.peak <= 0.98 * full.peak or [*LARGE_LOGITS.find(seen), *STATE_DOMINATES.find(seen)]:
        return
    text = (
        f"The peak is {memory(found.peak)}, and {memory(full.peak)} in fp32: weights, gradients and the"
        f" optimizer hold {memory(state_bytes(found))}, casts {memory(found.casts)}, and activations"
        f" {memory(found.activations)}."
    )
    action = "Mixed precision halves activations alone: it saves more with a larger batch."
    yield Finding("note", "memory-not-lower", text, action, 0.05)


MEMORY_NOT_LOWER = StepRule(_find)
