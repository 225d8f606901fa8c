"""A report of the doctor, written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_amp._plain_data import table
from lightning_amp._text import memory, percent, rounded, span
from lightning_amp.advice._findings import Finding
from lightning_amp.advice._gains import AS_IT_IS, IN_FP32, LARGER_BATCH, TIMES_LARGER, best_speed_up, gain, speed_up
from lightning_amp.advice._machine_facts import Machine
from lightning_amp.advice._step_facts import Memory, Step

_MOST_ROWS = 6
SIGNS = {"error": "✗", "warning": "!", "note": "·", "ok": "✓"}


def summary(step: Step) -> str:
    """Return the speed and the memory of a step beside fp32, in a sentence."""
    text = f"A step in {step.precision} takes {_ms(sum(step.parts.values()))}"
    measured = speed_up(step)
    if measured is not None and step.precision != "fp32":
        text += f" and is, without its data, {measured.words} as in fp32"
    if step.fp32_memory is not None:
        text += f"; its peak of memory is {memory(step.memory.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    return f"{text}."


def to_markdown(findings: Sequence[Finding], machine: Machine, step: Step | None) -> str:
    """Write a report as Markdown."""
    blocks = [f"# {title(machine, step)}"]
    if step is not None:
        blocks.append(summary(step))
    blocks.append("\n".join(_finding(finding) for finding in findings))
    return "\n\n".join([*blocks, *details(machine, step)]) + "\n"


def details(machine: Machine, step: Step | None) -> Iterator[str]:
    """Yield what was measured, as blocks of Markdown."""
    if step is not None:
        yield from _step(step, machine)
    yield from _machine(machine)


def title(machine: Machine, step: Step | None) -> str:
    """Return what was looked at."""
    return machine.device if step is None else f"{step.plugin} on {machine.device}"


def _finding(finding: Finding) -> str:
    action = f" **{finding.action}**" if finding.action else ""
    return f"- {SIGNS[finding.severity]} {finding.severity} `{finding.code}`: {finding.message}{action}"


# -- the step ----------------------------------------------------------------------------------------------------------


def _step(step: Step, machine: Machine) -> Iterator[str]:
    yield "## A step"
    total = sum(step.parts.values())
    rows = [(part, _ms(seconds), percent(seconds / total)) for part, seconds in _largest(step.parts)]
    yield table(("part", "time", "share"), [*rows, ("all", _ms(total), f"mean of {step.num_timed}")])
    rows = list(_variants(step))
    if rows:
        yield table(("the same step, without its data", "time", "against as it is"), rows)
    products = machine.gain(step.precision)
    if step.precision != "fp32" and products > 0 and step.fp32_product_share:
        yield (
            f"Products that run in {step.precision} are {percent(step.fp32_product_share)} of a step in fp32; if each"
            f" was {rounded(products)} times as fast, as large ones are on this device, a step would be"
            f" {rounded(best_speed_up(step, products))} times as fast (Amdahl)."
        )
    flops = sum(step.flops.values())
    if flops:
        rows = [(dtype, f"{count / 1e9:,.3g}", percent(count / flops)) for dtype, count in step.flops.items()]
        yield table(("products in", "GFLOP", "share"), rows)
    rows = list(_modules(step))
    if rows:
        yield table(("module (forward)", "GFLOP", "in"), rows)
    yield table(("memory at the peak", step.precision, "fp32"), _memory(step.memory, step.fp32_memory))
    if step.skipped:
        yield f"{step.skipped} steps were skipped while the loss scale settled; none of them was timed or recorded."
    if step.notes:
        yield "\n".join(f"- not measured: {note}" for note in step.notes)


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def _variants(step: Step) -> Iterator[tuple[str, str, str]]:
    for variant in step.variants:
        if not variant.step_s:
            continue
        ordered = sorted(variant.step_s)
        found = gain(step, variant.label)
        same = variant.label == AS_IT_IS or found is None
        against = "" if same or found is None else f"{rounded(found.ratio)} x ({_ends(found.low, found.high)})"
        if variant.label == LARGER_BATCH and found is not None:
            against = f"{rounded(TIMES_LARGER * found.ratio)} x the rows per second"
        label = f"{AS_IT_IS}: {step.precision}" if variant.label == AS_IT_IS else variant.label
        yield ("in fp32" if variant.label == IN_FP32 else label, _ms(ordered[len(ordered) // 2]), against)


def _ends(low: float, high: float) -> str:
    return span([rounded(low), rounded(high)])


def _modules(step: Step) -> Iterator[tuple[str, str, str]]:
    for name, by_dtype in list(step.module_flops.items())[:_MOST_ROWS]:
        yield f"`{name}`" if name else "outside of modules", f"{sum(by_dtype.values()) / 1e9:,.3g}", ", ".join(by_dtype)
    if len(step.module_flops) > _MOST_ROWS:
        rest = list(step.module_flops.values())[_MOST_ROWS:]
        dtypes = dict.fromkeys(dtype for by_dtype in rest for dtype in by_dtype)
        yield f"{len(rest)} more", f"{sum(sum(b.values()) for b in rest) / 1e9:,.3g}", ", ".join(dtypes)


def _memory(found: Memory, full: Memory | None) -> Iterator[tuple[str, str, str]]:
    names = {
        "weights": "weights and buffers",
        "gradients": "gradients",
        "states": "optimizer states",
        "activations": "activations",
        "logits": "logits of the loss",
        "casts": "copies in another format",
        "temporaries": "temporaries of the optimizer",
        "peak": "all",
    }
    for field, name in names.items():
        own, other = getattr(found, field), 0 if full is None else getattr(full, field)
        if own or other:
            yield name, memory(own), "" if full is None else memory(other)


# -- the machine -------------------------------------------------------------------------------------------------------


def _machine(machine: Machine) -> Iterator[str]:
    yield "## The machine"
    sizes = sorted({product.size for product in machine.products})
    speed = {(product.format, product.size): product.tflops for product in machine.products}
    rows = [
        (
            found.name,
            *(rounded(speed[found.name, n]) if (found.name, n) in speed else "" for n in sizes),
            _support(found),
        )
        for found in machine.formats
    ]
    yield table(("products, TFLOP/s", *map(str, sizes), "support"), rows)
    if machine.tf32:
        yield f"TF32 is {machine.tf32}."
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    size = f"; {rounded(machine.memory_gib)} GiB of memory" if machine.memory_gib else ""
    yield f"`auto` is {machine.precision}: {machine.precision_reason}. {versions}{size}."
    if machine.notes:
        yield "\n".join(f"- {note}" for note in machine.notes)


def _support(found: Any) -> str:
    return f"{found.support}: {found.reason}" if found.reason else found.support


def _ms(seconds: float) -> str:
    return f"{rounded(seconds * 1e3)} ms" if seconds < 1 else f"{rounded(seconds)} s"
