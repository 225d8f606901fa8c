"""What is said of one skipped step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_amp._text import exact, named, rounded
from lightning_amp.reports._overflow_cures import cure
from lightning_amp.tracing import domain

if TYPE_CHECKING:
    from lightning_amp.reports._overflow_report import OverflowReport
    from lightning_amp.tracing import Operation


def overflow_words(report: OverflowReport) -> str:
    """Write a report, several lines."""
    where = f"batch {report.batch_idx}"
    if report.window[0] != report.window[1]:
        where += f" (of batches {report.window[0]} to {report.window[1]}, which make one step)"
    rank = f", rank {report.rank}" if report.world_size > 1 else ""
    taken = "was taken although its loss is not finite, since its gradients are"
    became = "was skipped" if report.record.skipped else taken
    lines = [
        f"step {report.record.index} {became}: epoch {report.epoch}, {where}{rank}, loss scale"
        f" {exact(report.record.scale)}",
        f"  cause: {_cause(report)}",
    ]
    line = _line(report)
    if line:
        lines.append(f"  line: {line}")
    lines += [f"  before it: {text}" for text in _rounded_before(report)]
    if report.parameters:
        lines.append(f"  non-finite gradients: {named(report.parameters)}")
    if report.note:
        lines.append(f"  note: {report.note}")
    if _was_replayed(report):
        lines.append(f"  try: {cure(report)}")
    return "\n".join(lines)


def in_one_line(report: OverflowReport) -> str:
    """Write its cause, the line and what helps, in one line."""
    line = _line(report)
    return f"{_cause(report)}{f'; in {line}' if line else ''}. Try: {cure(report)}"


def _rounded_before(report: OverflowReport) -> list[str]:
    """Say which operation lost the digits, where that was found."""
    operation, line = report.diagnosis.operation, _line(report)
    if operation is None:
        return []
    where = domain(operation.name)
    becomes = where.end if operation.kind == "zero" else where.outside
    so = "" if operation.in_backward else f", so that the argument of `{operation.name}` is {becomes}"
    lost = [remedy.values[2:4] for remedy in report.remedies if remedy.kind == "source in fp32" and remedy.worked]
    return [
        f"the result of `{name}`{f' in {place}' if place not in ('', line) else ''} is rounded to half precision{so}"
        for name, place in lost
    ]


def _line(report: OverflowReport) -> str:
    operation = report.diagnosis.operation
    if operation is None or not operation.file:
        return ""
    return f'{Path(operation.file).name}:{operation.line} "{operation.code}"'


def _was_replayed(report: OverflowReport) -> bool:
    return report.cause != "not reproduced" or report.num_replayed > 0


# -- the cause ---------------------------------------------------------------------------------------------------------


def _cause(report: OverflowReport) -> str:
    found = report.diagnosis
    operation = found.operation
    if report.cause == "batch":
        entries = ", ".join(f"{count} in `batch{path}`" for path, count in found.entries)
        reached = f"; they first reach {_module(report)}" if found.module is not None else ""
        return f"the batch itself has non-finite values ({entries}){reached}"
    if report.cause == "weights":
        return f"`{found.parameter}` has non-finite values; they first reach {_module(report)}"
    if report.cause == "forward" and found.where == "input":
        return (
            f"the forward: what arrives at {_module(report)} is not finite although every module before it and the"
            " batch are; an operation between modules overflowed"
        )
    if report.cause == "forward":
        what = "the output" if operation is None else f"the result of `{operation.name}`"
        place = f"{what} {'of' if operation is None else 'in'} {_module(report)}"
        return f"the forward: {place}, {_tensor(report)}, is not finite{_details(report)}"
    if report.cause == "loss" and operation is not None:
        of_it = f"{operation.dtype} {list(operation.shape)}"
        return f"the loss: the result of `{operation.name}`, {of_it}, is not finite{_details(report)}"
    if report.cause == "loss":
        return "the loss: every module's output is finite, what `training_step` computes from them is not"
    if report.cause == "backward":
        scaled = "" if report.record.scale == 1 else "scaled "
        return f"the {scaled}backward alone, the loss is finite: {_backward(report)}"
    if not _was_replayed(report):
        return "not looked for"
    where = f", on all of {report.world_size} ranks" if report.world_size > 1 else ""
    return f"not found: every replay of the batch was finite, forward and backward{where}"


def _module(report: OverflowReport) -> str:
    found = report.diagnosis
    return f"`{found.module}` ({found.module_class})" if found.module else f"`{found.module_class}`"


def _tensor(report: OverflowReport) -> str:
    found = report.diagnosis
    return f"{found.dtype} {list(found.shape or ())}"


def _details(report: OverflowReport) -> str:
    """Say what stands out, what fp32 makes of it, and how large what went in is."""
    found, operation = report.diagnosis, report.diagnosis.operation
    if operation is None:
        parts: list[str] = []
        if found.largest_input is not None:
            parts.append(f"the largest finite input is {rounded(found.largest_input)}")
        if found.largest_weight is not None:
            parts.append(f"the largest finite weight {rounded(found.largest_weight)}")
        text = "; " + " and ".join(parts) if parts else ""
        return _either(report) + text
    special = _special(operation)
    lost = found.in_fp32 == "finite"
    text = (
        f": {special}{_either(report)}" if special and lost else _either(report) + (f": {special}" if special else "")
    )
    if not special and operation.largest_input is not None:
        text += f"; the largest finite input is {rounded(operation.largest_input)}"
    return text


def _either(report: OverflowReport) -> str:
    found, operation = report.diagnosis, report.diagnosis.operation
    if found.in_fp32 == "not finite":
        return ", nor is it in fp32"
    if found.in_fp32 == "finite" and operation is not None and operation.largest_in_fp32 is not None:
        return f"; in fp32 it is finite, up to {rounded(operation.largest_in_fp32)}"
    return "; in fp32 the step is finite" if found.in_fp32 == "finite" else ""


def _special(operation: Operation) -> str:
    at = f" at {list(operation.index)}" if operation.index else ""
    more = f", the first{at}" if operation.count > 1 and operation.index else at
    if operation.kind == "empty":
        return "it is taken over no values"
    if operation.kind == "ignored":
        return "each label of the batch is ignored, so that the mean is taken over no values"
    if operation.kind == "masked":
        rows = "a row is" if operation.count == 1 else f"{operation.count:,} rows are"
        return f"{rows} masked entirely, all of it minus infinity{more}"
    if operation.kind == "one":
        return "the spread of a single value, divided by 0"
    if operation.kind == "zero":
        what = "a divisor is" if operation.name in ("div", "div_") else "an argument is"
        is_lost = operation.kind_in_fp32 == "" and operation.largest_in_fp32 is not None
        return f"{what} {domain(operation.name).end}{more}{', which it is not in fp32' if is_lost else ''}"
    if operation.kind == "negative":
        return f"an argument is {domain(operation.name).outside}{more}"
    if operation.kind == "infinite":
        return "an infinity went in, and 0 times infinity, or infinity minus infinity, is NaN"
    if operation.kind == "outside":
        return "what went in was not finite before the step: it is neither in the batch, nor a parameter, nor a buffer"
    if operation.kind == "sum":
        return f"it adds up {operation.count:,} finite values, and the sum leaves the range of {operation.dtype}"
    if operation.kind == "cast" and operation.largest_input is not None:
        return f"{rounded(operation.largest_input)} does not fit into it"
    return ""


def _backward(report: OverflowReport) -> str:
    found, operation = report.diagnosis, report.diagnosis.operation
    if operation is not None and operation.in_backward:
        module = f" in `{operation.module}` ({operation.module_class})" if operation.module else ""
        tensor = f"{operation.dtype} {list(operation.shape)}"
        if operation.name in ("float", "to") and found.in_fp32 == "finite":
            text = f"the gradient{module}, which that line casts back to {tensor}, is not finite"
        elif operation.is_sum:
            text = f"the gradient that arrives at the result of `{operation.name}`{module}, {tensor}, is not finite"
        else:
            text = f"the gradient that `{operation.name}`{module} computes for its input, {tensor}, is not finite"
        if found.in_fp32 == "not finite":
            zero = (
                f"; its argument is {domain(operation.name).end}, where it has no finite derivative"
                if operation.kind == "zero"
                else ""
            )
            return f"{text}, nor is it in fp32{zero}"
        return text
    if found.where == "parameter":
        text = f"the gradient of `{found.parameter}`, in the backward of {_module(report)}"
    elif found.where == "input":
        text = f"the gradient that the backward of {_module(report)} computes for its input"
    else:
        text = f"the gradient that arrives at the output of {_module(report)}"
    return f"{text}, {_tensor(report)}, is not finite"
