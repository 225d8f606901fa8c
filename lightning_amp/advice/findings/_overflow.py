"""`overflow`: the step does not train."""

from __future__ import annotations

from lightning_amp._text import counted
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import (
    Step,
)
from lightning_amp.advice.findings._finding import (
    Decision,
    Finding,
)


def overflow(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find steps that are not finite after the loss scale had time to settle."""
    if not step.num_bad:
        return None
    what = "the loss or gradients are" if step.parts else "the loss is" if step.bad_loss else "gradients are"
    some = f"{step.num_bad} of {counted(step.num_seen, 'step')} in {step.precision}"
    text = f"{some} do not train: {what} infinite or NaN.{'' if step.parts else ' So no step was timed.'}"
    action = "Add `OverflowLocator()` to the callbacks of a run: it names the module, the line, and what helps."
    return Finding("error", "overflow", text, action, 1.0)
