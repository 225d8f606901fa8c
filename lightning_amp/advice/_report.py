"""`DoctorReport`: the result of :func:`lightning_amp.doctor`, and its page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from statistics import median

from typing_extensions import final, override

from lightning_amp._files import write_json
from lightning_amp._plain_data import Table, plain
from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import AS_IT_IS, IN_FP32, Recording, Step
from lightning_amp.advice.findings import findings_of
from lightning_amp.advice.findings._finding import FP32, Decision, Finding, Severity, decide, duration, in_fp32
from lightning_amp.advice.findings._products import best_speed_up, product_share
from lightning_amp.measure import times_as_fast

_FORMAT = 2
_MOST_MODULES = 6
_SIGNS: dict[Severity, str] = {"error": "✗", "warning": "!", "note": "·", "ok": "✓"}
_MEMORY = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "states": "optimizer states",
    "activations": "activations",
    "logits": "logits of the loss",
    "casts": "copies of weights",
    "peak": "all",
}


@final
class DoctorReport:
    """The result of :func:`lightning_amp.doctor`: findings, worst first, and the measurements behind them.

    .. code-block:: python

        report = doctor()
        print(report)
        print([finding.code for finding in report.findings if finding.is_problem])
        report.to_json("doctor.json")

    Attributes:
        machine: The measurements of the machine.
        step: The measurements of a training step; `None` if only the machine was examined.
        precision: The precision that the report examines, as :class:`AmpPrecision` names it.

    """

    def __init__(self, machine: Machine, step: Step | None = None, precision: str | None = None) -> None:
        self.machine, self.step = machine, step
        self.precision = step.precision if step is not None else precision or machine.precision

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, worst first; there is always one."""
        return findings_of(self.machine, self.decision, self.step)

    @cached_property
    def decision(self) -> Decision:
        """Return the recommended precision and its basis. Every finding agrees with it."""
        return decide(self.machine, self.precision, self.step)

    @property
    def has_problems(self) -> bool:
        """Return whether a finding is a warning or an error."""
        return any(finding.is_problem for finding in self.findings)

    @property
    def headline(self) -> str:
        """Return the speed of the step, or of matrix products, compared with fp32, and which precision to use."""
        use, speed, step = self.decision.use, self.decision.speed, self.step
        if step is not None:
            advice = "" if use is None else f' Use "{use}".' if use != self.precision else f' Stay with "{use}".'
            return f"{_measured(step)}{advice}"
        if use is None:
            known = f" ({in_fp32(speed)})" if speed is not None else ""
            return f"Undecided: matrix products do not tell which precision is faster{known}. Time your own step here."
        auto = "" if self.machine.precision == use else f' `auto` picks "{self.machine.precision}": name "{use}".'
        why = f"its matrix products are {in_fp32(speed)}" if speed is not None and use != FP32 else _NO_FASTER
        return f'Use "{use}" here: {why}.{auto}'

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({[finding.code for finding in self.findings]})"

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Return the headline, the findings and the measurements as Markdown."""
        lines = [
            f"- {_SIGNS[f.severity]} {f.severity} `{f.code}`: {f.message}{f' **{f.action}**' if f.action else ''}"
            for f in self.findings
        ]
        title = self.machine.device if self.step is None else f"{self.step.plugin} on {self.machine.device}"
        details = [
            *(_of_step(self.step, self.machine) if self.step else ()),
            *_of_machine(self.machine, self.step is None),
        ]
        return "\n\n".join([f"# {title}", self.headline, "\n".join(lines), *map(str, details)]) + "\n"

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the findings and all measurements to a path or a URL. NaN and infinities become texts."""
        step = None if self.step is None else asdict(replace(self.step, recorded=Recording(()), fp32_recorded=None))
        if step is not None and self.step is not None:
            step["recorded"] = {"flops": self.step.recorded.flops, "module_flops": self.step.recorded.module_flops}
        data = plain(
            {
                "format": _FORMAT,
                "precision": self.precision,
                "headline": self.headline,
                "decision": asdict(self.decision),
                "findings": [asdict(finding) for finding in self.findings],
                "machine": asdict(self.machine),
                "step": step,
            }
        )
        write_json(path, data)


_NO_FASTER = "no half precision is measured to be faster"


def _measured(step: Step) -> str:
    """Write the speed and the memory of a step, compared with fp32, in one sentence."""
    timed, full, speed = step.variant(AS_IT_IS), step.variant(IN_FP32), step.speed(AS_IT_IS, IN_FP32)
    if timed is None:
        when = f"takes {duration(step.seconds)}" if step.parts else "was not timed"
    else:
        when = f"takes {duration(median(timed.step_s))} without its data"
    text = f"A step in {step.precision} {when}"
    if full is not None and speed is not None and step.precision != FP32:
        text += f", and {duration(median(full.step_s))} in fp32 ({speed})"
    if step.fp32_memory is not None:
        text += f"; its peak of memory is {memory(step.memory.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    return f"{text}."


def _of_step(step: Step, machine: Machine) -> Iterator[str | Table]:
    yield "## A step"
    if step.parts:
        parts = sorted(step.parts.items(), key=lambda item: -item[1])
        rows = [(part, duration(seconds), percent(seconds / step.seconds)) for part, seconds in parts]
        mean = f"mean of {counted(step.num_timed, 'step')}"
        yield Table(("part", "time", "share"), [*rows, ("all", duration(step.seconds), mean)])
    noise = "noise: more than this change can gain"
    timed = [(v.label, duration(median(v.step_s)), step.gain(v.label) or noise) for v in step.variants if v.step_s]
    if timed:
        rows = [(label, time, "" if label == AS_IT_IS else str(gain)) for label, time, gain in timed]
        yield Table(("the same step later, in turns, without its data", "time", "against as it is"), rows)
    product, share = machine.product(step.precision), product_share(step, machine)
    if product is not None and product.speed is not None and product.speed.claim == "faster" and share:
        yield (
            f"Products that run in {step.precision} are {percent(share)} of a step in fp32. If each was"
            f" {times_as_fast(product.speed.ratio)}, as products of {product.size} rows and columns are on this device,"
            f" they alone would make a step {times_as_fast(best_speed_up(step, machine))} (Amdahl)."
        )
    flops = step.recorded.flops
    if flops:
        total = sum(flops.values())
        shares = ", ".join(f"{percent(count / total)} in {dtype}" for dtype, count in flops.items())
        yield f"Products of a step have {total / 1e9:,.3g} GFLOP: {shares}."
    if len(flops) > 1:
        modules = list(step.recorded.module_flops.items())[:_MOST_MODULES]
        rows = [(f"`{name}`", f"{sum(by.values()) / 1e9:,.3g}", ", ".join(by)) for name, by in modules]
        yield Table(("module (forward)", "GFLOP", "in"), rows)
    both = [step.memory, *([step.fp32_memory] if step.fp32_memory is not None else [])]
    rows = [
        (name, *(memory(getattr(found, field)) for found in both))
        for field, name in _MEMORY.items()
        if any(getattr(found, field) for found in both)
    ]
    yield Table(("memory at the peak", step.precision, FP32)[: len(both) + 1], rows)
    yield "The peak is measured; copies and logits follow from the sizes of tensors, and activations are the rest."
    yield from (f"- not measured: {v.label}: {v.error}" for v in step.variants if v.error)


def _of_machine(machine: Machine, with_traps: bool) -> Iterator[str | Table]:
    yield "## The machine"
    sizes = sorted({product.size for product in machine.products})
    rates = {(product.format, product.size): rounded(product.tflops) for product in machine.products}
    rows = [
        (
            found.name,
            *(rates.get((found.name, size), "") for size in sizes),
            found.support + (f": {found.reason}" if found.reason else ""),
        )
        for found in machine.formats
    ]
    yield Table(("products, TFLOP/s", *map(str, sizes), "support"), rows)
    if machine.tf32 is not None:
        how = "are computed with fewer bits" if machine.tf32 else "are computed in full precision"
        yield f"TF32 is {'on' if machine.tf32 else 'off'}: fp32 products {how} (`torch.set_float32_matmul_precision`)."
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    size = f"; {rounded(machine.memory_gib)} GiB of memory" if machine.memory_gib else ""
    yield f"`auto` picks {machine.precision}: {machine.precision_reason}. {versions}{size}."
    notes = [*machine.notes, *(f"known fault: {trap}" for trap in (machine.traps if with_traps else ()))]
    if notes:
        yield "\n".join(f"- {note}" for note in notes)
