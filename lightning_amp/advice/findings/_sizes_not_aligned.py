"""`sizes-not-aligned`: products in half precision whose sizes are no multiples of what the device likes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from lightning_amp._text import percent
from lightning_amp.advice._gains import compare, is_worth_it
from lightning_amp.advice._record import AS_IT_IS, Operation, Recording, Unaligned
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule, graded
from lightning_amp.measure import FORWARD

Sizes = tuple[int, int, int]
Timed = Callable[[str, Sizes, Sizes, float], tuple[Sequence[float], Sequence[float]]]
"""Times a product in a format with two triples of sizes, for at most so many seconds each; seconds by round."""

_HALF = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_MOST = 8
"""How many products are kept."""
_NOT_MULTIPLIED = 32
"""A dimension this small (the classes of a head, a single output) is not worth a pad."""


def unaligned(recorded: Recording, multiple: int, timed: Timed, budget_s: float = 3.0) -> tuple[Unaligned, ...]:
    """Return the products whose sizes are no multiples; those with the most FLOPs are timed with padding.

    Args:
        recorded: A step.
        multiple: What sizes should be multiples of.
        timed: Times a product as it is and padded.
        budget_s: How long measuring may take.

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
    a, b, c = (size if size < _NOT_MULTIPLIED else -(-size // multiple) * multiple for size in sizes)
    return a, b, c


def _find(seen: Seen) -> Iterator[Finding]:
    step = seen.step
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
        f"{percent(share)} of the FLOPs are products with sizes that are no multiples of {step.alignment}, most in"
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


SIZES_NOT_ALIGNED = StepRule(_find)
