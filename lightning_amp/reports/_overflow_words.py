"""Write the sentences of an overflow report: the cause, from the diagnosis, and the advice, from the tried remedies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_amp._text import listed, rounded
from lightning_amp.findings import Remedy, RemedyKind
from lightning_amp.tracing import EXPONENTIALS, NORMS, SUMMING, Diagnosis, Operation, domain, plain

# -- the cause ---------------------------------------------------------------------------------------------------------


def cause_words(found: Diagnosis, is_scaled: bool) -> str:
    """Name the value that was not finite, with special properties such as its shape or its inputs.

    Return an empty text if everything was finite.
    """
    operation = found.operation
    if found.cause == "batch":
        entries = ", ".join(f"{count} in `batch{path}`" for path, count in found.entries)
        reached = f"; they first reach {_module(found)}" if found.module is not None else ""
        return f"the batch itself has non-finite values ({entries}){reached}"
    if found.cause == "weights":
        return f"`{found.parameter}` has non-finite values; they first reach {_module(found)}"
    if found.cause == "forward" and found.where == "input":
        return (
            f"the forward: the input of {_module(found)} is not finite, although the batch and the output of every"
            " module before it are; an operation between modules overflowed"
        )
    if found.cause == "forward":
        what = "the output" if operation is None else f"the result of `{operation.name}`"
        place = f"{what} {'of' if operation is None else 'in'} {_module(found)}"
        return f"the forward: {place}, {_tensor(found)}, is not finite{_details(found)}"
    if found.cause == "loss" and operation is not None:
        return f"the loss: the result of `{operation.name}`, {_tensor(operation)}, is not finite{_details(found)}"
    if found.cause == "loss":
        return "the loss: every module's output is finite, but the loss that `training_step` computes from them is not"
    if found.cause == "backward":
        return f"the {'scaled ' if is_scaled else ''}backward alone, the loss is finite: {_backward(found)}"
    return ""


def line_of(found: Diagnosis) -> str:
    """Write the line that is to blame; return an empty text if it is not known."""
    operation = found.operation
    if operation is None or not operation.file:
        return ""
    return f'{Path(operation.file).name}:{operation.line} "{operation.code}"'


def _module(found: Diagnosis) -> str:
    return f"`{found.module}` ({found.module_class})" if found.module else f"`{found.module_class}`"


def _tensor(of: Diagnosis | Operation) -> str:
    return f"{of.dtype} {list(of.shape or ())}"


def _details(found: Diagnosis) -> str:
    """Write the special values among the operation's arguments, its result in fp32, and the size of its input."""
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
        return "an input is infinite, and 0 times infinity, or infinity minus infinity, is NaN"
    if operation.kind == "outside":
        return "an input was not finite before the step; it is neither in the batch, nor a parameter, nor a buffer"
    if operation.kind == "sum":
        return f"it adds up {operation.count:,} finite values, and the sum leaves the range of {operation.dtype}"
    if operation.kind == "cast" and operation.largest_input is not None:
        return f"{rounded(operation.largest_input)} does not fit into {operation.dtype}"
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


# -- the advice --------------------------------------------------------------------------------------------------------

EPSILONS = "an epsilon under roots, logarithms and quotients"
_OF_SIGMOID = {"x": "log(sigmoid(x))", "-x": "log(1 - sigmoid(x))"}


def in_words(remedy: Remedy, operation: Operation | None) -> str:
    """Write the advice of a remedy; return an empty text for a remedy that only adds its number to other advice."""
    if remedy.kind == "bf16":
        return "'bf16', which has the range of fp32 (tried: works)"
    if remedy.kind == "fp32_modules":
        return f"`fp32_modules=[{', '.join(repr(name) for name in remedy.values)}]` (tried: works)"
    if remedy.kind == "operation in fp32":
        is_sum = operation is not None and operation.kind == "sum"
        return f"`.float()` {'before that sum' if is_sum else 'on the inputs of that line'} (tried: works)"
    if remedy.kind == "source in fp32":
        name, line, _, lossy_line, *others = remedy.values
        where = f" in {line}" if line != lossy_line else ""
        return f"`.float()` on the inputs of `{name}`{where} (tried: works){_there_too(others)}"
    if remedy.kind == "logsigmoid":
        form, *others = remedy.values
        also = _there_too(others)
        return f"`F.logsigmoid({form})` in the place of `{_OF_SIGMOID[form]}` (tried: works){also}"
    if remedy.kind == "operation without autocast":
        return "that line in `torch.autocast(..., enabled=False)`, with `.float()` inputs (tried: works)"
    return ""


def that_worked(remedies: Sequence[Remedy], operation: Operation | None) -> list[str]:
    """Write the advice of each remedy that worked."""
    return [text for one in remedies if one.worked and (text := in_words(one, operation))]


def worked(remedies: Sequence[Remedy], kind: RemedyKind) -> tuple[Any, ...] | None:
    """Return the values of the first remedy of this kind that worked; `None` if none did."""
    return next((one.values for one in remedies if one.kind == kind and one.worked), None)


def failed(remedies: Sequence[Remedy], kind: RemedyKind) -> bool:
    """Return whether remedies of this kind were tried, and none worked."""
    return any(one.kind == kind for one in remedies) and worked(remedies, kind) is None


def by_hand(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Write the advice for an operation whose result is finite in fp32: another way to write it."""
    if operation is None:
        return ""
    if plain(operation.name) in EXPONENTIALS:
        return _on_exponential(operation, remedies)
    if operation.name in ("to", "to_"):
        return "keep that tensor in float32, or a constant within `torch.finfo(x.dtype)`"
    return fitting_epsilon(operation, remedies)


def fitting_epsilon(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Name an epsilon that the format can represent; return an empty text if no epsilon helps."""
    epsilon = worked(remedies, "epsilon")
    if epsilon is None or operation is None or operation.kind != "zero":
        return ""
    return f"an epsilon that {operation.dtype} holds ({_plain(epsilon[0])}, tried: works)"


def for_any_precision(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Write the advice for an operation whose result is not finite in fp32 either."""
    if operation is None:
        return EPSILONS
    if worked(remedies, "logsigmoid") is not None:
        return "; or ".join(that_worked(remedies, operation))
    if operation.kind in ("zero", "negative") and failed(remedies, "epsilon"):
        tried = [_plain(remedy.values[0]) for remedy in remedies if remedy.kind == "epsilon"]
        return f"look at that line: an epsilon there does not help (tried: {tried[0]} to {tried[-1]})"
    if operation.kind == "infinite":
        return "replace infinities by `torch.where` or `masked_fill` before a product or a sum of them"
    if operation.is_sum:
        return "look for a hook that edits that gradient, and at the gradients that are added up"
    if operation.kind == "outside":
        return "find out where that tensor is made"
    epsilons = worked(remedies, "epsilon")
    tried = "" if epsilons is None else f" ({_plain(epsilons[0])}, tried: works){_there_too(epsilons[1:])}"
    if operation.kind == "masked":
        finite = " (tried: works)" if worked(remedies, "finite mask") is not None else ""
        return f"leave at least one entry of each row unmasked, or mask with `torch.finfo(x.dtype).min`{finite}"
    if operation.kind == "ignored":
        return "leave out batches without a label, or sum the losses (`reduction='sum'`) and divide by `max(1, count)`"
    if operation.kind == "empty":
        return "leave out empty tensors before it: `if x.numel()`; or divide a sum by `max(1, count)`"
    if operation.kind == "one":
        return "`unbiased=False` (`correction=0`), or more than one value"
    if operation.name.startswith("CheckpointFunction"):
        return "look into that checkpointed region: with `use_reentrant=False` its line is named here"
    if operation.kind == "function":
        return f"look at the `backward` of `{operation.name}`: what it divides by, or takes a root or logarithm of"
    if operation.in_backward and operation.kind == "zero":
        where = "in front of it" if operation.name not in NORMS else "inside: `(x.square().sum() + eps).sqrt()`"
        return (
            f"an epsilon {where}{tried}; a `torch.where` behind it does not help, the derivative is taken on both sides"
        )
    if operation.kind == "negative":
        where = domain(operation.name)
        return f"keep the argument of `{operation.name}` {where.inside}: `.clamp({where.clamp})`{tried}"
    if operation.kind == "zero":
        what = "the divisor" if operation.name in ("div", "div_") else f"the argument of `{operation.name}`"
        return f"an epsilon in {what}{tried}"
    if plain(operation.name) in EXPONENTIALS and (cured := _on_exponential(operation, remedies)):
        return cured
    if operation.name == "ctc_loss":
        tried = " (tried: works)" if worked(remedies, "zero_infinity") is not None else ""
        return f"`zero_infinity=True`{tried}, or inputs that are at least as long as their labels need"
    if operation.largest_input is not None and operation.largest_input > 1e15:
        no_larger = "; 'fp32' holds no larger numbers than bfloat16" if operation.dtype == "bfloat16" else ""
        return (
            f"find out where {rounded(operation.largest_input)} comes from: an outlier in the data, or weights that"
            f" grow (a lower learning rate, gradient clipping){no_larger}"
        )
    return "look at the inputs of that line: its result is not finite in fp32 either"


def _on_exponential(operation: Operation, remedies: Sequence[Remedy]) -> str:
    if operation.followed_by in (*SUMMING, "div"):
        return "subtract the maximum before the exponential (`torch.logsumexp`, `log_softmax`)"
    largest = worked(remedies, "clamp")
    if largest is None and failed(remedies, "clamp"):
        return ""
    if largest is None:
        return f"keep the argument of `{operation.name}` small, with a `.clamp(max=...)`"
    return f"keep the argument of `{operation.name}` small: `.clamp(max={largest[0]:g})` (tried: works)"


def _there_too(lines: Sequence[str]) -> str:
    return f", and the same in {listed(list(lines), 2)}" if lines else ""


def _plain(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")
