"""What helps against the cause of a skipped step: what was tried and worked, and never what did not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_amp._text import listed, rounded
from lightning_amp.findings import Remedy, RemedyKind
from lightning_amp.tracing import EXPONENTIALS, NORMS, SUMMING, Operation, domain, plain

EPSILONS = "an epsilon under roots, logarithms and quotients"
_OF_SIGMOID = {"x": "log(sigmoid(x))", "-x": "log(1 - sigmoid(x))"}


def in_words(remedy: Remedy, operation: Operation | None) -> str:
    """Say what to do, where a remedy stands for itself; empty for one that adds its number to other advice."""
    if remedy.kind == "bf16":
        return "'bf16', whose range is that of fp32 (tried: works)"
    if remedy.kind == "fp32_modules":
        return f"`fp32_modules=[{', '.join(repr(name) for name in remedy.values)}]` (tried: works)"
    if remedy.kind == "operation in fp32":
        is_sum = operation is not None and operation.kind == "sum"
        return f"`.float()` {'before that sum' if is_sum else 'on what goes into that line'} (tried: works)"
    if remedy.kind == "source in fp32":
        name, line, _, lossy_line, *others = remedy.values
        where = f" in {line}" if line != lossy_line else ""
        return f"`.float()` on what goes into `{name}`{where} (tried: works){_there_too(others)}"
    if remedy.kind == "logsigmoid":
        form, *others = remedy.values
        also = _there_too(others)
        return f"`F.logsigmoid({form})` in the place of `{_OF_SIGMOID[form]}` (tried: works){also}"
    if remedy.kind == "operation without autocast":
        return "that line in `torch.autocast(..., enabled=False)`, with `.float()` inputs (tried: works)"
    return ""


def that_worked(remedies: Sequence[Remedy], operation: Operation | None) -> list[str]:
    """Say what worked, of the remedies that stand for themselves."""
    return [text for one in remedies if one.worked and (text := in_words(one, operation))]


def worked(remedies: Sequence[Remedy], kind: RemedyKind) -> tuple[Any, ...] | None:
    """Return the values of the first remedy of a kind that worked; `None` if none did."""
    return next((one.values for one in remedies if one.kind == kind and one.worked), None)


def failed(remedies: Sequence[Remedy], kind: RemedyKind) -> bool:
    """Return whether a kind of remedy was tried, and never worked."""
    return any(one.kind == kind for one in remedies) and worked(remedies, kind) is None


def by_hand(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Say what to write instead, where fp32 has the result; the first that fits the operation."""
    if operation is None:
        return ""
    if plain(operation.name) in EXPONENTIALS:
        return _on_exponential(operation, remedies)
    if operation.name in ("to", "to_"):
        return "keep that tensor in float32, or a constant within `torch.finfo(x.dtype)`"
    return fitting_epsilon(operation, remedies)


def fitting_epsilon(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Say which epsilon the format holds; empty where none helps."""
    epsilon = worked(remedies, "epsilon")
    if epsilon is None or operation is None or operation.kind != "zero":
        return ""
    return f"an epsilon that {operation.dtype} holds ({_plain(epsilon[0])}, tried: works)"


def for_any_precision(operation: Operation | None, remedies: Sequence[Remedy]) -> str:
    """Advise where fp32 is not finite either."""
    if operation is None:
        return EPSILONS
    if worked(remedies, "logsigmoid") is not None:
        return "; or ".join(that_worked(remedies, operation))
    if operation.kind in ("zero", "negative") and failed(remedies, "epsilon"):
        tried = [_plain(remedy.values[0]) for remedy in remedies if remedy.kind == "epsilon"]
        return f"look at that line: an epsilon there does not help (tried: {tried[0]} to {tried[-1]})"
    if operation.kind == "infinite":
        return "`torch.where` or `masked_fill` in the place of a product with, or a sum of, infinities"
    if operation.is_sum:
        return "look at what edits that gradient (a hook), and at what is added up"
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
    return "look at what goes into that line: its result is not finite in fp32 either"


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
