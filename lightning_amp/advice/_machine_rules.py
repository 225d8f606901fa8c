"""What a machine can and cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._findings import Finding
from lightning_amp.advice._machine_facts import Format, Machine
from lightning_amp.advice._step_facts import Step

_FASTER = 1.1


def machine_findings(machine: Machine, precision: str, step: Step | None = None) -> Iterator[Finding]:
    """Yield what there is to say.

    Args:
        machine: What was measured.
        precision: Which one is going to be used, as :class:`AmpPrecision` names it.
        step: What is said beside it; then nothing is said of formats and traps that do not concern it.

    """
    yield from _emulated(machine, precision, others=step is None)
    yield from _slow(machine, precision)
    yield from _tf32(machine)
    for trap in machine.traps:
        if step is not None and trap.concerns == "convolutions" and not step.convolutions:
            continue
        if step is not None and trap.concerns not in ("", "convolutions"):
            continue
        text = f"{trap.package} {trap.version}: {trap.text}."
        yield Finding("note", "version-trap", text, f"Read {trap.source}, and see whether it concerns you.")


def _emulated(machine: Machine, precision: str, *, others: bool) -> Iterator[Finding]:
    for found in machine.formats:
        if found.support == "native" or found.name in ("fp32", "tf32"):
            continue
        chosen = found.name == precision
        if not chosen and not others:
            continue
        if found.support == "missing":
            if chosen:
                yield Finding(
                    "error", "emulated-precision", f"{machine.device} has no {found.name}: {found.reason}.",
                    _instead(machine), 1.0,
                )  # fmt: skip
            continue
        text = f"{found.name} is emulated here ({found.reason}){_speed(machine, found)}."
        action = _instead(machine) if chosen else f"Do not train in {found.name!r} here to save time."
        yield Finding("error" if chosen else "note", "emulated-precision", text, action, 1.0 if chosen else 0.0)


def _speed(machine: Machine, found: Format) -> str:
    full = machine.format("fp32")
    if full is None or not full.tflops or not found.tflops:
        return ""
    ratio = found.tflops / full.tflops
    words = f"{rounded(1 / ratio)} times as slow as" if ratio < 1 else f"{rounded(ratio)} times as fast as"
    return f": its matrix products reach {rounded(found.tflops)} TFLOP/s, {words} those of fp32"


def _instead(machine: Machine) -> str:
    return f'Use `AmpPrecision("{machine.precision}")`: {machine.precision_reason}.'


def _slow(machine: Machine, precision: str) -> Iterator[Finding]:
    chosen = machine.format(precision)
    if chosen is None or precision == "fp32" or chosen.support != "native":
        return
    ratio = machine.gain(precision)
    if 0 < ratio < _FASTER:
        text = (
            f"Matrix products in {precision} reach {rounded(chosen.tflops)} TFLOP/s, {rounded(ratio)} times those of"
            " fp32: this device gains no speed from it, only memory."
        )
        yield Finding("warning", "no-faster-products", text, 'Stay in "fp32" unless you need the memory.', 0.9)


def _tf32(machine: Machine) -> Iterator[Finding]:
    tf32, full = machine.format("tf32"), machine.format("fp32")
    if tf32 is None or full is None or not full.tflops or not machine.tf32.startswith("off"):
        return
    text = (
        f"TF32 is off: fp32 products reach {rounded(full.tflops)} TFLOP/s, and {rounded(tf32.tflops)} with TF32. What"
        " stays in fp32 beside mixed precision is computed in full."
    )
    action = '`torch.set_float32_matmul_precision("high")` turns it on; it rounds the inputs of products to 10 bits.'
    yield Finding("note", "tf32-off", text, action)


def verdict(machine: Machine) -> Finding:
    """Return what to use on this machine, and why."""
    best = machine.format(machine.precision)
    gain = machine.gain(machine.precision)
    text = f'Use "{machine.precision}" here: {machine.precision_reason}'
    if best is not None and gain > 0 and machine.precision != "fp32":
        text += f"; its matrix products reach {rounded(best.tflops)} TFLOP/s, {rounded(gain)} times those of fp32"
        if best.fills_at:
            text += f", from {best.fills_at} rows and columns on"
    return Finding("ok", "precision", f"{text}.")
