"""`precision`: what to use on this machine, where no step was looked at."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision, mixed_formats
from lightning_amp.advice._machine import Machine
from lightning_amp.advice.findings._finding import Finding
from lightning_amp.advice.findings._words import in_fp32


def precision(machine: Machine, decision: Decision) -> Finding:
    """Return what to use on this machine, and why."""
    if decision.use is None:
        text = f"Undecided: {'; '.join(_by_format(machine)) or 'no half precision was measured'}"
        return Finding("ok", "precision", f"{text}.", "`doctor(Model, Data)` times your own step.")
    text = f'Use "{decision.use}" here: '
    product = machine.compared_product(decision.use)
    if decision.use != FP32 and product is not None and product.speed is not None:
        found = machine.format(decision.use)
        text += f"its matrix products reach {rounded(product.tflops)} TFLOP/s ({in_fp32(product.speed)})"
        if found is not None and found.fills_at > min(p.size for p in machine.products):
            text += f"; smaller ones than {found.fills_at} rows and columns reach less than three quarters of it"
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
