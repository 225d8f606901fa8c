"""`emulated-precision`, `tf32-off` and `precision`: which formats a machine supports, and which one to use on it."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision, mixed_formats
from lightning_amp.advice._gains import speed_up
from lightning_amp.advice._machine import Format, Machine
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._finding import Finding
from lightning_amp.advice.findings._not_faster import reason_of
from lightning_amp.advice.findings._words import in_fp32, recommendation


def emulated_precision(machine: Machine, decision: Decision, step: Step | None) -> Iterator[Finding]:
    """Yield the finding for the examined format and, without a step, also for the other formats that run here."""
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


def tf32_off(machine: Machine) -> Iterator[Finding]:
    """Yield the finding if this device has TF32 and products were measured with and without it."""
    tf32, full = machine.format("tf32"), machine.format("fp32")
    if tf32 is None or full is None or not full.tflops or machine.tf32 != "off":
        return
    text = (
        f"TF32 is off: fp32 products reach {rounded(full.tflops)} TFLOP/s, and {rounded(tf32.tflops)} with TF32."
        " Products that mixed precision leaves in fp32 are computed in full precision."
    )
    action = '`torch.set_float32_matmul_precision("high")` turns it on; it rounds the inputs of products to 10 bits.'
    yield Finding("note", "tf32-off", text, action)


def precision(machine: Machine, decision: Decision) -> Finding:
    """Return the recommended precision, and why."""
    if decision.use is None:
        text = f"Undecided: {'; '.join(_by_format(machine)) or 'no half precision was measured'}"
        return Finding("ok", "precision", f"{text}.", "`doctor(Model, Data)` times your own step.")
    text = f'Use "{decision.use}" here: '
    product = machine.compared_product(decision.use)
    if decision.use != FP32 and product is not None and product.speed is not None:
        found = machine.format(decision.use)
        text += f"its matrix products reach {rounded(product.tflops)} TFLOP/s ({in_fp32(product.speed)})"
        if found is not None and found.fills_at > min(p.size for p in machine.products):
            text += f"; products below {found.fills_at} rows and columns reach less than three quarters of it"
        slow = machine.slowest_convolution(decision.use)
        if slow is not None:
            text += (
                f". Not for convolutions: the {slow.part} of a 3x3 one with stride {slow.stride} is"
                f" {in_fp32(slow.speed)}"
            )
    else:
        found = "; ".join(_by_format(machine))
        text += f"no half precision is measured to be faster ({found})" if found else "no half precision runs"
    if machine.precision != decision.use:
        text += f'. `auto` picks "{machine.precision}" here: name "{decision.use}" instead'
    return Finding("ok", "precision", f"{text}.")


def _by_format(machine: Machine) -> Iterator[str]:
    for name in mixed_formats(machine):
        speed, found = machine.speed(name), machine.format(name)
        if speed is not None:
            yield f"matrix products in {name}: {in_fp32(speed)}"
        elif found is not None:
            yield f"{name} is {found.support} ({found.reason}), its products were not measured"
