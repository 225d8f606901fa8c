"""`nothing-to-do` and `not-timed`: no finding asks for a change, or the race could not time the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from lightning_amp._text import memory
from lightning_amp.advice._decision import FP32
from lightning_amp.advice._gains import speed_up
from lightning_amp.advice._record import AS_IT_IS, IN_FP32, Step
from lightning_amp.advice.findings._finding import Evidence, Finding
from lightning_amp.advice.findings._words import duration


def nothing_to_do(evidence: Evidence, others: Sequence[Finding]) -> Iterator[Finding]:
    """Yield `not-timed` if the step was not timed, else `nothing-to-do` if none of the other findings is a problem."""
    if evidence.step.variant(AS_IT_IS) is None:
        errors = [variant.error for variant in evidence.step.variants if variant.label == AS_IT_IS]
        text = f"The step could not be timed in turns with others, so nothing was tried: {' '.join(errors)}."
        yield Finding("note", "not-timed", text, "Look at the table of parts, which was measured.")
    elif not any(finding.is_problem for finding in others):
        speed = evidence.decision.speed
        is_open = speed is not None and evidence.decision.use is None and speed.decided_ratio is None
        text = "Nothing was found to change." if is_open else "Nothing to do."
        yield Finding("ok", "nothing-to-do", f"{text} {summary(evidence.step)}")


def summary(step: Step) -> str:
    """Write the speed and the memory of a step, compared with fp32, in one sentence."""
    timed, full, speed = step.variant(AS_IT_IS), step.variant(IN_FP32), speed_up(step)
    if timed is None:
        text = f"A step in {step.precision} takes {duration(step.seconds)}"
    else:
        text = f"A step in {step.precision} takes {duration(median(timed.step_s))} without its data"
    if full is not None and speed is not None and step.precision != FP32:
        text += f", and {duration(median(full.step_s))} in fp32 ({speed})"
    if step.fp32_memory is not None:
        text += f"; its peak of memory is {memory(step.memory.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    return f"{text}."
