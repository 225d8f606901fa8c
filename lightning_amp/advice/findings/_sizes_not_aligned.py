"""`sizes-not-aligned`: matrix products in half precision whose sizes are not multiples of 8 (16 for fp8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from lightning_amp._text import percent
from lightning_amp.advice._gains import compare, is_worth_it
from lightning_amp.advice._record import AS_IT_IS, Operation, Recording, Unaligned
from lightning_amp.advice.findings._finding import Evidence, Finding, graded
from lightning_amp.measure import FORWARD

Sizes = tuple[int, int, int]

_HALF = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_MOST = 8
"""Products to keep."""
_NOT_PADDED = 32
"""A dimension below this (the classes of a head, a single output) is not worth padding."""


def unaligned(
    recorded: Recording,
    multiple: int,
    timed: Callable[[str, Sizes, Sizes, float], tuple[Sequence[float], Sequence[float]]],
    budget_s: float = 3.0,
) -> tuple[Unaligned, ...]:
    """Return the products whose sizes are not aligned, the most FLOPs first, and time padding for the first ones.

    Args:
        recorded: A step.
        multiple: The number that sizes should be multiples of.
        timed: Times a product unchanged and padded, given its format, both sizes, and the time limit of each in
            seconds. It returns the seconds by round.
        budget_s: Seconds for all measurements.

    """
    groups: defaultdict[tuple[Sizes, str], list[Operation]] = defaultdict(list)
    for operation in recorded.of_the_module:
        if operation.sizes and operation.dtype in _HALF and _padded(operation.sizes, multiple) != operation.sizes:
            groups[operation.sizes, operation.dtype].append(operation)
    most = sorted(groups.items(), key=lambda item: -sum(o.flops for o in item[1]))[:_MOST]
    found: list[Unaligned] = []
    for (sizes, dtype), own in most:
        padded = _padded(sizes, multiple)
        module = next((o.module for o in own if o.part == FORWARD and o.module), "")
        flops = sum(o.flops for o in own)
        if budget_s <= 0:
            found.append(Unaligned(sizes, padded, module, flops))
            continue
        per_run = min(0.2, budget_s / 4)
        name = _HALF[dtype] if _HALF[dtype] != "fp8" else "bf16"
        as_it_is, with_pads = timed(name, sizes, padded, per_run)
        budget_s -= 2 * per_run
        seconds, padded_seconds = median(as_it_is) * len(own), median(with_pads) * len(own)
        speed = compare(with_pads, as_it_is)
        found.append(Unaligned(sizes, padded, module, flops, seconds, padded_seconds, speed))
    return tuple(found)


def _padded(sizes: Sizes, multiple: int) -> Sizes:
    a, b, c = (size if size < _NOT_PADDED else -(-size // multiple) * multiple for size in sizes)
    return a, b, c


def sizes_not_aligned(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if such products are 5 % of the FLOPs; it is a warning if padding saves 5 % of a step."""
    step = evidence.step
    share = sum(found.flops for found in step.unaligned) / max(sum(step.recorded.flops.values()), 1)
    if share < 0.05:
        return
    as_is = step.variant(AS_IT_IS)
    step_s = median(as_is.step_s) if as_is is not None else max(step.seconds, 1e-12)
    faster = [found for found in step.unaligned if is_worth_it(found.padded_speed)]
    saved_s = min(sum(found.seconds - found.padded_seconds for found in faster), step.recorded.product_s)
    gained = min(1.0, saved_s / max(step_s, 1e-12))
    worst = step.unaligned[0]
    before, after = (" x ".join(map(str, sizes)) for sizes in (worst.sizes, worst.padded))
    text = (
        f"{percent(share)} of the FLOPs are products with sizes that are not multiples of {step.alignment}, most in"
        f" `{worst.module}` ({before})"
    )
    if gained:
        text += f"; padded, they save {percent(gained)} of a step, measured product by product"
    elif worst.padded_speed is not None:
        text += f"; padded to {after}, measured here: {worst.padded_speed}"
    pads = ", ".join(f"{a} to {b}" for a, b in zip(worst.sizes, worst.padded, strict=True) if a != b)
    action = f"Pad vocabularies, features and sequence lengths to multiples of {step.alignment} ({pads})."
    if worst.padded_speed is not None and worst.padded_speed.claim in ("same", "slower") and not gained:
        action = "Leave them as they are: padding gains nothing here."
    yield Finding(graded(gained, 0.05), "sizes-not-aligned", f"{text}.", action, max(gained, 0.01))
