"""What helps against the cause of a skipped step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_amp._text import exact, listed, rounded
from lightning_amp.numerics import fitting_scale
from lightning_amp.tracing import EXPONENTIALS, NORMS, SUMMING, domain, plain

if TYPE_CHECKING:
    from lightning_amp.reports._overflow_report import OverflowReport
    from lightning_amp.tracing import Operation

_EPSILONS = "an epsilon under roots, logarithms and quotients"
_GROWN = 1e2
_OF_SIGMOID = {"x": "log(sigmoid(x))", "-x": "log(1 - sigmoid(x))"}
_IN_ANY_PRECISION = {"logsigmoid", "epsilon", "finite mask", "clamp", "zero_infinity"}


def cure(report: OverflowReport) -> str:
    """Say what helps: what was tried and worked first, and never what did not."""
    found = report.diagnosis
    if report.cause == "batch":
        return "clean the data, or leave this batch out; no precision can help"
    if report.cause == "weights":
        return "go back to a checkpoint in which it is finite; no step can be taken with such a value, in any precision"
    if report.cause == "not reproduced" and not report.record.skipped:
        return "look at non-deterministic operations, and at earlier batches of the window"
    if report.cause == "not reproduced":
        return (
            "look at what edits gradients between the backward and the step (hooks, callbacks), at non-deterministic"
            " operations, and at earlier batches of the window"
        )
    grown = _grown(report)
    if grown:
        return grown
    if found.in_fp32 == "not finite":
        return f"{_for_any_precision(report)}; no precision can help"
    if found.in_fp32 == "" and any(r.worked for r in report.remedies if r.kind in _IN_ANY_PRECISION):
        return _for_any_precision(report)
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
            is_sum = report.diagnosis.operation is not None and report.diagnosis.operation.kind == "sum"
            where = "before that sum" if is_sum else "on what goes into that line"
            words.append(f"`.float()` {where} (tried: works)")
        if remedy.kind == "source in fp32":
            name, line, _, lossy_line, *others = remedy.values
            where = f" in {line}" if line != lossy_line else ""
            words.append(f"`.float()` on what goes into `{name}`{where} (tried: works){_there_too(others)}")
        if remedy.kind == "logsigmoid":
            form = remedy.values[0]
            also = _there_too(remedy.values[1:])
            words.append(f"`F.logsigmoid({form})` in the place of `{_OF_SIGMOID[form]}` (tried: works){also}")
        if remedy.kind == "operation without autocast":
            words.append("that line in `torch.autocast(..., enabled=False)`, with `.float()` inputs (tried: works)")
    return words


def _there_too(lines: Sequence[str]) -> str:
    return f", and the same in {listed(list(lines), 2)}" if lines else ""


def _by_hand(report: OverflowReport) -> str:
    """Say what to write instead; the first that fits the operation."""
    operation = report.diagnosis.operation
    if operation is None:
        return ""
    if plain(operation.name) in EXPONENTIALS:
        return _on_exponential(report, operation)
    if operation.name in ("to", "to_"):
        return "keep that tensor in float32, or a constant within `torch.finfo(x.dtype)`"
    return _fitting_epsilon(report, operation)


def _fitting_epsilon(report: OverflowReport, operation: Operation) -> str:
    epsilon = next((r.values[0] for r in report.remedies if r.kind == "epsilon" and r.worked), None)
    if epsilon is None or operation.kind != "zero":
        return ""
    return f"an epsilon that {operation.dtype} holds ({_plain(epsilon)}, tried: works)"


def _on_exponential(report: OverflowReport, operation: Operation) -> str:
    if operation.followed_by in (*SUMMING, "div"):
        return "subtract the maximum before the exponential (`torch.logsumexp`, `log_softmax`)"
    largest = next((r.values[0] for r in report.remedies if r.kind == "clamp" and r.worked), None)
    if largest is None and _failed(report, "clamp"):
        return ""
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
    if operation is None:
        return _EPSILONS
    if any(remedy.kind == "logsigmoid" and remedy.worked for remedy in report.remedies):
        return "; or ".join(_that_worked(report))
    if operation.kind in ("zero", "negative") and _failed(report, "epsilon"):
        tried = [_plain(remedy.values[0]) for remedy in report.remedies if remedy.kind == "epsilon"]
        return f"look at that line: an epsilon there does not help (tried: {tried[0]} to {tried[-1]})"
    if operation.kind == "infinite":
        return "`torch.where` or `masked_fill` in the place of a product with, or a sum of, infinities"
    if operation.is_sum:
        return "look at what edits that gradient (a hook), and at what is added up"
    if operation.kind == "outside":
        return "find out where that tensor is made"
    epsilons = next((r.values for r in report.remedies if r.kind == "epsilon" and r.worked), None)
    tried = "" if epsilons is None else f" ({_plain(epsilons[0])}, tried: works){_there_too(epsilons[1:])}"
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
    if plain(operation.name) in EXPONENTIALS and (cured := _on_exponential(report, operation)):
        return cured
    if operation.name == "ctc_loss":
        tried = " (tried: works)" if any(r.kind == "zero_infinity" and r.worked for r in report.remedies) else ""
        return f"`zero_infinity=True`{tried}, or inputs that are at least as long as their labels need"
    if operation.largest_input is not None and operation.largest_input > 1e15:
        no_larger = "; 'fp32' holds no larger numbers than bfloat16" if operation.dtype == "bfloat16" else ""
        return (
            f"find out where {rounded(operation.largest_input)} comes from: an outlier in the data, or weights that"
            f" grow (a lower learning rate, gradient clipping){no_larger}"
        )
    return "look at what goes into that line: its result is not finite in fp32 either"


def _plain(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _failed(report: OverflowReport, kind: str) -> bool:
    tried = [remedy.worked for remedy in report.remedies if remedy.kind == kind]
    return bool(tried) and not any(tried)


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
    operation = report.diagnosis.operation
    epsilon = "" if operation is None else _fitting_epsilon(report, operation)
    worked = [*_that_worked(report), *filter(None, [epsilon])]
    size = ""
    if report.largest_gradient is not None:
        size = f": the largest true gradient of this batch is {rounded(report.largest_gradient)}"
    if _has_range_of_fp32(report):
        first = "; or ".join(worked) or f"{_EPSILONS}, or what computes their arguments in fp32 (`fp32_modules`)"
        return f"{first}{size}{' in fp32, where nothing is rounded to zero before it' if size else ''}"
    scale = report.working_scale
    if scale is not None and report.scale_is == "dynamic":
        return (
            f"nothing, if it happens now and then: at a scale of {exact(scale)} the step is finite (tried: works), and"
            " the scaler goes there by itself"
        )
    if scale is not None:
        why = "static" if report.scale_is == "static" else "at its `min_scale`, which should be lower"
        other = ", or a dynamic one" if report.scale_is == "static" else ""
        return f"a loss scale of {exact(scale)} or below (tried: works){other}{size}, and this scale is {why}"
    divisor = next((r.values[0] for r in report.remedies if r.kind == "divisor" and r.worked), None)
    if divisor is not None:
        room = divisor if report.largest_gradient is None else 1 / fitting_scale(report.largest_gradient, lowest=-126)
        return (
            f"dividing the loss by a constant ({exact(max(room, divisor))} at least; tried: works), or 'bf16'{size},"
            " which does not fit into fp16 even without a loss scale"
        )
    tried = [exact(r.values[0]) for r in report.remedies if r.kind == "scale"]
    none = f"; no loss scale helps (tried: {listed(tried, 4)})" if tried else ""
    fits = size and (report.largest_gradient or 0) <= 65504
    lost = ", which fits; something on the way to it does not" if fits else ""
    if not worked and report.diagnosis.in_fp32 == "finite" and not _failed(report, "bf16"):
        worked = ["'bf16', whose range is that of fp32"]
    return f"{'; or '.join(worked) or 'look at that line'}{none}{size}{lost}"


def _has_range_of_fp32(report: OverflowReport) -> bool:
    return report.precision in ("bf16-mixed", "32-true")
