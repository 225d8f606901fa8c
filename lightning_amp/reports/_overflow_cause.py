"""The cause of a skipped step in words, from its diagnosis."""

from __future__ import annotations

from pathlib import Path

from lightning_amp._text import rounded
from lightning_amp.tracing import Diagnosis, Operation, domain


def cause_words(found: Diagnosis, is_scaled: bool) -> str:
    """Say what was not finite, and what stands out about it; empty if everything was finite."""
    operation = found.operation
    if found.cause == "batch":
        entries = ", ".join(f"{count} in `batch{path}`" for path, count in found.entries)
        reached = f"; they first reach {_module(found)}" if found.module is not None else ""
        return f"the batch itself has non-finite values ({entries}){reached}"
    if found.cause == "weights":
        return f"`{found.parameter}` has non-finite values; they first reach {_module(found)}"
    if found.cause == "forward" and found.where == "input":
        return (
            f"the forward: what arrives at {_module(found)} is not finite although every module before it and the"
            " batch are; an operation between modules overflowed"
        )
    if found.cause == "forward":
        what = "the output" if operation is None else f"the result of `{operation.name}`"
        place = f"{what} {'of' if operation is None else 'in'} {_module(found)}"
        return f"the forward: {place}, {_tensor(found)}, is not finite{_details(found)}"
    if found.cause == "loss" and operation is not None:
        return f"the loss: the result of `{operation.name}`, {_tensor(operation)}, is not finite{_details(found)}"
    if found.cause == "loss":
        return "the loss: every module's output is finite, what `training_step` computes from them is not"
    if found.cause == "backward":
        return f"the {'scaled ' if is_scaled else ''}backward alone, the loss is finite: {_backward(found)}"
    return ""


def line_of(found: Diagnosis) -> str:
    """Write the line that is to blame; empty if it is not known."""
    operation = found.operation
    if operation is None or not operation.file:
        return ""
    return f'{Path(operation.file).name}:{operation.line} "{operation.code}"'


def _module(found: Diagnosis) -> str:
    return f"`{found.module}` ({found.module_class})" if found.module else f"`{found.module_class}`"


def _tensor(of: Diagnosis | Operation) -> str:
    return f"{of.dtype} {list(of.shape or ())}"


def _details(found: Diagnosis) -> str:
    """Say what stands out, what fp32 makes of it, and how large what went in is."""
    operation, in_fp32 = found.operation, _in_fp32(found)
    if operation is None:
        parts: list[str] = []
        if found.largest_input is not None:
            parts.append(f"the largest finite input is {rounded(found.largest_input)}")
        if found.largest_weight is not None:
            parts.append(f"the largest finite weight {rounded(found.largest_weight)}")
        return in_fp32 + ("; " + " and ".join(parts) if parts else "")
    if special := _special(operation):
        return f": {special}{in_fp32}" if found.in_fp32 == "finite" else f"{in_fp32}: {special}"
    if operation.largest_input is None:
        return in_fp32
    return f"{in_fp32}; the largest finite input is {rounded(operation.largest_input)}"


def _in_fp32(found: Diagnosis) -> str:
    if found.in_fp32 == "not finite":
        return ", nor is it in fp32"
    if found.in_fp32 == "finite" and found.operation is not None and found.operation.largest_in_fp32 is not None:
        return f"; in fp32 it is finite, up to {rounded(found.operation.largest_in_fp32)}"
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


def _backward(found: Diagnosis) -> str:
    operation = found.operation
    if operation is not None and operation.in_backward:
        module = f" in `{operation.module}` ({operation.module_class})" if operation.module else ""
        tensor = _tensor(operation)
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
        text = f"the gradient of `{found.parameter}`, in the backward of {_module(found)}"
    elif found.where == "input":
        text = f"the gradient that the backward of {_module(found)} computes for its input"
    else:
        text = f"the gradient that arrives at the output of {_module(found)}"
    return f"{text}, {_tensor(found)}, is not finite"
