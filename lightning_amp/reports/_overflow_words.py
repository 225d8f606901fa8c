"""What is said of one skipped step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_amp._text import exact, listed, named, rounded
from lightning_amp.numerics import fitting_scale

if TYPE_CHECKING:
    from lightning_amp.reports._overflow_report import OverflowReport
    from lightning_amp.tracing import Operation

_EPSILONS = "an epsilon under roots, logarithms and quotients"
_GROWN = 1e3
_POWERS = {"exp", "exp_", "expm1", "exp2", "cosh", "sinh"}


def overflow_words(report: OverflowReport) -> str:
    """Write a report, several lines."""
    where = f"batch {report.batch_idx}"
    if report.window[0] != report.window[1]:
        where += f" (of batches {report.window[0]} to {report.window[1]}, which make one step)"
    rank = f", rank {report.rank}" if report.world_size > 1 else ""
    lines = [
        f"step {report.record.index} was skipped: epoch {report.epoch}, {where}{rank}, loss scale"
        f" {exact(report.record.scale)}",
        f"  cause: {_cause(report)}",
    ]
    operation = report.diagnosis.operation
    if operation is not None and operation.file:
        lines.append(f'  line: {Path(operation.file).name}:{operation.line} "{operation.code}"')
    if report.parameters:
        lines.append(f"  non-finite gradients: {named(report.parameters)}")
    if report.note:
        lines.append(f"  note: {report.note}")
    if _was_replayed(report):
        lines.append(f"  try: {_advice(report)}")
    return "\n".join(lines)


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
    text = f": {special}" if special else ""
    text += _either(report)
    if not special and operation.largest_input is not None:
        text += f"; the largest finite input is {rounded(operation.largest_input)}"
    return text


def _either(report: OverflowReport) -> str:
    found, operation = report.diagnosis, report.diagnosis.operation
    if found.in_fp32 == "not finite":
        return ", nor is it in fp32"
    if found.in_fp32 == "finite" and operation is not None and operation.largest_in_fp32 is not None:
        return f"; in fp32 it is, up to {rounded(operation.largest_in_fp32)}"
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
        lost = "; it is not in fp32, where half precision rounds it to 0" if operation.kind_in_fp32 == "" else ""
        return f"{what} 0{more}{lost if operation.largest_in_fp32 is not None else ''}"
    if operation.kind == "negative":
        return f"an argument is below 0{more}"
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
            end = "1 or -1" if operation.name in ("acos", "asin", "atanh") else "0"
            zero = f"; its argument is {end}, where it has no finite derivative" if operation.kind == "zero" else ""
            return f"{text}, nor is it in fp32{zero}"
        return text
    if found.where == "parameter":
        text = f"the gradient of `{found.parameter}`, in the backward of {_module(report)}"
    elif found.where == "input":
        text = f"the gradient that the backward of {_module(report)} computes for its input"
    else:
        text = f"the gradient that arrives at the output of {_module(report)}"
    return f"{text}, {_tensor(report)}, is not finite"


# -- the cure ----------------------------------------------------------------------------------------------------------


def _advice(report: OverflowReport) -> str:
    found = report.diagnosis
    if report.cause == "batch":
        return "clean the data, or leave this batch out; no precision can help"
    if report.cause == "weights":
        return "go back to a checkpoint from before it; no step can be taken with such a value, in any precision"
    if report.cause == "not reproduced":
        return (
            "look at what edits gradients between the backward and the step (hooks, callbacks), at non-deterministic"
            " operations, and at earlier batches of the window"
        )
    if found.in_fp32 == "not finite":
        return f"{_for_any_precision(report)}; no precision can help"
    if report.cause == "backward":
        return _on_scale(report)
    worked = _that_worked(report)
    by_hand = _by_hand(report)
    if not worked and not by_hand:
        return _in_general(report)
    text = "; or ".join([*worked, *([by_hand] if by_hand else [])])
    return f"{text}. Lowering the loss scale cannot help" if report.record.scale != 1 else text


def _that_worked(report: OverflowReport) -> list[str]:
    words: list[str] = []
    for remedy in report.remedies:
        if not remedy.worked:
            continue
        if remedy.kind == "bf16":
            words.append("'bf16', whose range is that of fp32 (tried: works)")
        if remedy.kind == "fp32_modules":
            rules = ", ".join(repr(name) for name in remedy.values)
            words.append(f"`fp32_modules=[{rules}]` (tried: works)")
        if remedy.kind == "operation in fp32":
            words.append("`.float()` on what goes into that line (tried: works)")
        if remedy.kind == "operation without autocast":
            words.append("that line in `torch.autocast(..., enabled=False)`, with `.float()` inputs (tried: works)")
    return words


def _by_hand(report: OverflowReport) -> str:
    """Say what to write instead; the first that fits the operation."""
    operation = report.diagnosis.operation
    if operation is None:
        return ""
    if operation.name in _POWERS:
        return _on_exponential(report, operation)
    if operation.name in ("to", "to_"):
        return "keep that tensor in float32, or a constant within `torch.finfo(x.dtype)`"
    if operation.kind == "zero":
        return f"an epsilon that {operation.dtype} holds: 1e-8 is 0 in float16, `torch.finfo(x.dtype).tiny` is not"
    return ""


def _on_exponential(report: OverflowReport, operation: Operation) -> str:
    if operation.followed_by in ("sum", "logsumexp", "mean", "div"):
        return "subtract the maximum before the exponential (`torch.logsumexp`, `log_softmax`)"
    largest = next((r.values[0] for r in report.remedies if r.kind == "clamp" and r.worked), None)
    if largest is None:
        return f"keep the argument of `{operation.name}` small, with a `.clamp(max=...)`"
    return f"keep the argument of `{operation.name}` small: `.clamp(max={largest:g})` (tried: works)"


def _in_general(report: OverflowReport) -> str:
    """Advise where no operation is known, or nothing that was tried has worked."""
    found = report.diagnosis
    if report.cause == "loss":
        return (
            "compute the loss in fp32 (`.float()` on what goes into it) and in a stable form (`cross_entropy`,"
            " `logsumexp`, an epsilon under roots and quotients)"
        )
    if _has_range_of_fp32(report) or found.dtype == "bfloat16":
        return (
            "making what goes into the module smaller (a normalisation before it), and epsilons under roots,"
            " logarithms and quotients; 'fp32' holds no larger numbers than bfloat16"
        )
    tried = any(remedy.kind == "bf16" for remedy in report.remedies)
    first = "" if tried else "'bf16', whose range is that of fp32; or "
    smaller = "make what goes into the module smaller (a normalisation before it)"
    return f"{first}{smaller}. Lowering the loss scale cannot help"


def _for_any_precision(report: OverflowReport) -> str:
    operation = report.diagnosis.operation
    grown = _grown(report)
    if grown:
        return grown
    if operation is None:
        return _EPSILONS
    epsilon = next((r.values[0] for r in report.remedies if r.kind == "epsilon" and r.worked), None)
    tried = "" if epsilon is None else f" ({epsilon:g}, tried: works)".replace("e-0", "e-")
    if operation.kind == "masked":
        works = any(r.kind == "finite mask" and r.worked for r in report.remedies)
        finite = " (tried: works)" if works else ""
        return f"leave at least one entry of each row unmasked, or mask with `torch.finfo(x.dtype).min`{finite}"
    if operation.kind == "ignored":
        return "leave out batches without a label, or sum the losses (`reduction='sum'`) and divide by `max(1, count)`"
    if operation.kind == "empty":
        return "leave out what is empty before it: `if x.numel()`; or divide a sum by `max(1, count)`"
    if operation.kind == "one":
        return "`unbiased=False` (`correction=0`), or more than one value"
    if operation.name.startswith("CheckpointFunction"):
        return "look into that checkpointed region: with `use_reentrant=False` its line is named here"
    if operation.kind == "function":
        return f"look at the `backward` of `{operation.name}`: what it divides by, or takes a root or logarithm of"
    if operation.in_backward and operation.kind == "zero":
        where = (
            "in front of it"
            if operation.name not in ("norm", "vector_norm")
            else "inside: `(x.square().sum() + eps).sqrt()`"
        )
        return (
            f"an epsilon {where}{tried}; a `torch.where` behind it does not help, the derivative is taken on both sides"
        )
    if operation.kind == "negative":
        return f"keep the argument of `{operation.name}` from below 0: `.clamp(min=eps)`{tried}"
    if operation.kind == "zero":
        what = "the divisor" if operation.name in ("div", "div_") else f"the argument of `{operation.name}`"
        return f"an epsilon in {what}{tried}"
    if operation.name in _POWERS:
        return _on_exponential(report, operation)
    if operation.name == "ctc_loss":
        tried = " (tried: works)" if any(r.kind == "zero_infinity" and r.worked for r in report.remedies) else ""
        return f"`zero_infinity=True`{tried}, or inputs that are at least as long as their labels need"
    if operation.largest_input is not None and operation.largest_input > 1e15:
        no_larger = "; 'fp32' holds no larger numbers than bfloat16" if operation.dtype == "bfloat16" else ""
        return (
            f"find out where {rounded(operation.largest_input)} comes from: an outlier in the data, or weights that"
            f" grow (a lower learning rate, gradient clipping){no_larger}"
        )
    return _EPSILONS


def _grown(report: OverflowReport) -> str:
    if report.largest_weights is None:
        return ""
    before, now = report.largest_weights
    if not (math.isfinite(now) and now > _GROWN * max(before, 1.0)):
        return ""
    return (
        f"a lower learning rate, or gradient clipping: the largest weight has grown from {rounded(before)} to"
        f" {rounded(now)} since the start of this fit"
    )


def _on_scale(report: OverflowReport) -> str:
    if report.largest_gradient is not None and not math.isfinite(report.largest_gradient):
        return (
            f"{_EPSILONS}, whose derivatives at 0 are not finite: in fp32 the gradients of this batch are not finite"
            " either, so no precision can help"
        )
    worked = _that_worked(report)
    size = ""
    if report.largest_gradient is not None:
        size = f"the largest true gradient of this batch is {rounded(report.largest_gradient)}"
    if _has_range_of_fp32(report):
        first = "; or ".join(worked) or f"{_EPSILONS}, or what computes their arguments in fp32 (`fp32_modules`)"
        return f"{first}: {size} in fp32, where nothing is rounded to zero before it"
    falls = report.record.next_scale < report.record.scale
    scale = report.working_scale
    if scale is not None and falls:
        return (
            f"nothing, if it happens now and then: {size}, which fits at a scale of {exact(scale)} (tried: works), and"
            " the scaler goes there by itself"
        )
    if scale is not None:
        return (
            f"a loss scale of {exact(scale)} or below (tried: works), or a dynamic one: {size}, and this scale did not"
            " fall (it is static, at its `min_scale`, or within its `hysteresis`)"
        )
    divisor = next((r.values[0] for r in report.remedies if r.kind == "divisor" and r.worked), None)
    if divisor is not None:
        assert report.largest_gradient is not None
        room = 1 / fitting_scale(report.largest_gradient, lowest=-126)  # for other batches
        return (
            f"dividing the loss by a constant ({exact(max(room, divisor))} at least; tried: works), or 'bf16': {size},"
            " which does not fit into fp16 even without a loss scale"
        )
    if worked:
        tried = [exact(r.values[0]) for r in report.remedies if r.kind == "scale"]
        none = f"; no loss scale helps (tried: {listed(tried, 4)})" if tried else ""
        return f"{'; or '.join(worked)}{none}: {size}, which fits; something on the way to it does not"
    return f"'bf16', whose range is that of fp32: {size}, which fits; something on the way to it does not"


def _has_range_of_fp32(report: OverflowReport) -> bool:
    return report.precision in ("bf16-mixed", "32-true")
