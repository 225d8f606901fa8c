"""`emulated-precision`: a format has no instructions here, or does not run at all."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._decision import Decision
from lightning_amp.advice._gains import speed_up
from lightning_amp.advice._machine import Format, Machine
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._finding import Finding
from lightning_amp.advice.findings._not_faster import reason_of
from lightning_amp.advice.findings._words import in_fp32, recommendation


def emulated_precision(machine: Machine, decision: Decision, step: Step | None) -> Iterator[Finding]:
    """Yield it for the format that is looked at and, if there is no step, for the others that run."""
    for found in machine.formats:
        if found.support not in ("emulated", "missing"):
            continue
        if found.name == decision.looked_at:
            yield _chosen(machine, decision, found, step)
        elif step is None and found.support == "emulated" and decision.use != found.name:
            speed = machine.speed(found.name)
            slower = speed is not None and speed.claim == "slower"
            action = f'Do not train in "{found.name}" here to save time.' if slower else ""
            yield Finding("note", "emulated-precision", f"{_emulated(machine, found)}.", action)


def _chosen(machine: Machine, decision: Decision, found: Format, step: Step | None) -> Finding:
    if found.support == "missing":
        text = f"{machine.device} has no {found.name}: {found.reason}."
        return Finding("error", "emulated-precision", text, recommendation(decision), 1.0)
    text = _emulated(machine, found)
    speed = speed_up(step) if step is not None else None
    if step is not None and speed is not None:
        text += f". A step in it: {in_fp32(speed)}"
        if speed.ratio < 1 and (reason := reason_of(step)) is not None:
            text += f"; {reason.text}"
    if decision.advises_against:
        return Finding("error", "emulated-precision", f"{text}.", recommendation(decision), 1.0)
    return Finding("note", "emulated-precision", f"{text}.")


def _emulated(machine: Machine, found: Format) -> str:
    text = f"{found.name} is emulated here ({found.reason})"
    product = machine.compared_product(found.name)
    if product is None or product.speed is None:
        return text
    return (
        f"{text}: its matrix products of {product.size} rows and columns reach {rounded(product.tflops)} TFLOP/s"
        f" ({in_fp32(product.speed)})"
    )
