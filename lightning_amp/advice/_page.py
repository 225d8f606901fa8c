"""Write a report of the doctor: the sentences of its findings, and tables of the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from lightning_amp._plain_data import Table
from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._gains import best_speed_up, gain, more_rows, most_gain
from lightning_amp.advice._machine import Format, Machine
from lightning_amp.advice._record import AS_IT_IS, IN_FP32, LARGER_BATCH, Label, Memory, Step
from lightning_amp.advice.findings import Finding, Severity, duration, summary
from lightning_amp.measure import DATA, times_as_fast

_MOST_ROWS = 6
_DIFFERENT = 1.1
"""If two measured times of one step differ by this factor, the page explains the difference."""
SIGNS: dict[Severity, str] = {"error": "✗", "warning": "!", "note": "·", "ok": "✓"}

_TF32 = {
    (True, "on"): "on: fp32 products may be computed in bf16 (`set_float32_matmul_precision`)",
    (False, "on"): "on: fp32 products are computed in TF32",
    (False, "off"): "off: fp32 products are computed in full precision",
}
"""The key is a pair: whether the device is a CPU, and the state of the switch. A CPU has no TF32 that could be off."""


def to_markdown(findings: Sequence[Finding], machine: Machine, step: Step | None) -> str:
    """Write a report as Markdown."""
    first = "\n".join(_finding(finding) for finding in findings)
    blocks = [f"# {title(machine, step)}", *([] if step is None else [summary(step)]), first]
    return "\n\n".join([*blocks, *map(str, details(machine, step))]) + "\n"


def details(machine: Machine, step: Step | None) -> Iterator[str | Table]:
    """Yield the measurements: paragraphs of Markdown, and tables that are not laid out yet."""
    if step is not None:
        yield from _step(step, machine)
    yield from _machine(machine)


def title(machine: Machine, step: Step | None) -> str:
    """Write the plugin and the device that were examined."""
    return machine.device if step is None else f"{step.plugin} on {machine.device}"


def _finding(finding: Finding) -> str:
    action = f" **{finding.action}**" if finding.action else ""
    return f"- {SIGNS[finding.severity]} {finding.severity} `{finding.code}`: {finding.message}{action}"


# -- the step ----------------------------------------------------------------------------------------------------------


def _step(step: Step, machine: Machine) -> Iterator[str | Table]:
    yield "## A step"
    total = step.seconds
    rows = [(part, duration(seconds), percent(seconds / total)) for part, seconds in _largest(step.parts)]
    yield Table(
        ("part", "time", "share"), [*rows, ("all", duration(total), f"mean of {counted(step.num_timed, 'step')}")]
    )
    yield from _other_time(step)
    rows = list(_variants(step))
    if rows:
        yield Table(("the same step, without its data", "time", "against as it is"), rows)
    products = machine.speed(step.precision)
    if products is not None and products.claim == "faster" and step.fp32_product_share:
        yield (
            f"Products that run in {step.precision} are {percent(step.fp32_product_share)} of a step in fp32. If each"
            f" was {times_as_fast(products.ratio)}, as large ones are on this device, they alone would make a step"
            f" {times_as_fast(best_speed_up(step, products.ratio))} (Amdahl)."
        )
    flops = sum(step.recorded.flops.values())
    if flops:
        rows = [(dtype, f"{count / 1e9:,.3g}", percent(count / flops)) for dtype, count in step.recorded.flops.items()]
        yield Table(("products in", "GFLOP", "share"), rows)
    rows = list(_modules(step))
    if rows:
        yield Table(("module (forward)", "GFLOP", "in"), rows)
    formats = [step.precision, *(["fp32"] if step.fp32_memory is not None else [])]
    yield Table(("memory at the peak", *formats), list(_memory(step.memory, step.fp32_memory)))
    if step.skipped:
        yield f"{step.skipped} steps were skipped while the loss scale settled."
    if step.notes:
        yield "\n".join(f"- not measured: {note}" for note in step.notes)


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def _other_time(step: Step) -> Iterator[str]:
    """Explain why the parts do not add up to the step time measured in the race, if they do not."""
    timed = step.variant(AS_IT_IS)
    parts_s = sum(seconds for part, seconds in step.parts.items() if part != DATA)
    if timed is None or parts_s / _DIFFERENT <= (race_s := median(timed.step_s)) <= parts_s * _DIFFERENT:
        return
    yield (
        f"Without data, the parts add up to {duration(parts_s)}, the mean of {counted(step.num_timed, 'step')}."
        f" The rounds below ran later, on a few of the batches; their median is {duration(race_s)}. The speed of a"
        f" shared machine changes{', and slow single steps raise a mean' if parts_s > race_s else ''}."
    )


def _variants(step: Step) -> Iterator[tuple[str, str, str]]:
    for variant in step.variants:
        if variant.step_s:
            label = {AS_IT_IS: f"{AS_IT_IS}: {step.precision}", IN_FP32: "in fp32"}.get(variant.label, variant.label)
            yield label, duration(median(variant.step_s)), _against(step, variant.label)


def _against(step: Step, label: Label) -> str:
    """Write the speed of a variant relative to the unchanged step."""
    if label == AS_IT_IS:
        return ""
    found = gain(step, label)
    if found is None:
        return f"noise: {times_as_fast(most_gain(step, label))} is possible at most"
    rows = more_rows(step) if label == LARGER_BATCH else None
    return str(found) if rows is None else f"per row: {rows}"


def _modules(step: Step) -> Iterator[tuple[str, str, str]]:
    for name, by_dtype in list(step.recorded.module_flops.items())[:_MOST_ROWS]:
        yield f"`{name}`" if name else "outside of modules", f"{sum(by_dtype.values()) / 1e9:,.3g}", ", ".join(by_dtype)
    if len(step.recorded.module_flops) > _MOST_ROWS:
        rest = list(step.recorded.module_flops.values())[_MOST_ROWS:]
        dtypes = dict.fromkeys(dtype for by_dtype in rest for dtype in by_dtype)
        yield f"{len(rest)} more", f"{sum(sum(b.values()) for b in rest) / 1e9:,.3g}", ", ".join(dtypes)


def _memory(found: Memory, full: Memory | None) -> Iterator[tuple[str, ...]]:
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
            yield name, memory(own), *(() if full is None else (memory(other),))


# -- the machine -------------------------------------------------------------------------------------------------------


def _machine(machine: Machine) -> Iterator[str | Table]:
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
    yield Table(("products, TFLOP/s", *map(str, sizes), "support"), rows)
    rows = list(_convolutions(machine))
    if rows:
        yield Table(("against fp32", "3x3 convolution, forward", "3x3 convolution, backward"), rows)
    if machine.tf32:
        yield f"TF32 is {_TF32[machine.device_type == 'cpu', machine.tf32]}."
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    size = f"; {rounded(machine.memory_gib)} GiB of memory" if machine.memory_gib else ""
    yield f"`auto` picks {machine.precision}: {machine.precision_reason}. {versions}{size}."
    if machine.notes:
        yield "\n".join(f"- {note}" for note in machine.notes)


def _convolutions(machine: Machine) -> Iterator[tuple[str, str, str]]:
    speed = {(found.format, found.stride, found.part): found.speed for found in machine.convolutions}
    for name, stride in dict.fromkeys((found.format, found.stride) for found in machine.convolutions):
        parts = (speed.get((name, stride, part)) for part in ("forward", "backward"))
        forward, backward = ("" if part is None else str(part) for part in parts)
        yield f"{name}, stride {stride}", forward, backward


def _support(found: Format) -> str:
    return f"{found.support}: {found.reason}" if found.reason else found.support
