"""`not-faster` and `model-too-small`: a step gains no speed, although nothing else explains it.

Where the matrix products themselves gain nothing, that is `no-faster-products`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._text import percent, rounded
from lightning_amp.advice._decision import FP32
from lightning_amp.advice._gains import best_speed_up, is_worth_it, more_rows, speed_up
from lightning_amp.advice._record import TIMES_LARGER, Step
from lightning_amp.advice.findings._finding import Finding, Seen, Severity, StepRule
from lightning_amp.advice.findings._fp32_products import FP32_PRODUCTS
from lightning_amp.advice.findings._many_casts import MANY_CASTS, cast_sites
from lightning_amp.advice.findings._words import in_fp32, in_ms
from lightning_amp.measure import BACKWARD, FORWARD, SpeedComparison, times_as_fast

_SMALL, _LARGE = 1.35, 1.5
"""A step whose products allow less than the first is too small; from the second on, more was to be expected."""
_MOST = 8
"""How many slow products are kept."""


@final
@dataclass(frozen=True)
class SlowProduct:
    """Matrix products of one place that take longer than in fp32.

    Attributes:
        where: A module, or `"backward"`.
        operation: As in `aten`.
        seconds: Of a step.
        fp32_s: Of a step in fp32.

    """

    where: str
    operation: str
    seconds: float
    fp32_s: float


def slower_products(step: Step) -> tuple[SlowProduct, ...]:
    """Return products that take longer than in fp32, those that lose most first."""
    if step.fp32_recorded is None:
        return ()
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, recorded in enumerate((step.recorded, step.fp32_recorded)):
        for operation in recorded.of_the_module:
            if operation.flops:
                where = operation.module if operation.part == FORWARD else operation.part
                seconds[where, operation.name][number] += operation.seconds
    found = [SlowProduct(where, name, a, b) for (where, name), (a, b) in seconds.items() if a > b > 0]
    return tuple(sorted(found, key=lambda product: product.fp32_s - product.seconds)[:_MOST])


@final
class SlowReason(NamedTuple):
    """The part of a recorded step that takes longest for what it does.

    Attributes:
        cause: `"kernel"`: an operation that takes longer than in fp32.
        text: With its times.

    """

    cause: Literal["kernel", "casts", "other operations"]
    text: str


def reason_of(step: Step) -> SlowReason | None:
    """Return what one recorded step shows; `None` if it shows nothing."""
    slower, product_s, all_s = slower_products(step), step.recorded.product_s, step.recorded.seconds
    lost = sum(product.seconds - product.fp32_s for product in slower)
    if slower and lost > 0.3 * product_s and lost > 0.1 * all_s:
        worst = slower[0]
        where = "in the backward" if worst.where == BACKWARD else f"in module `{worst.where}`"
        return SlowReason(
            "kernel",
            f"in one recorded step of each, `{worst.operation}` {where} takes {in_ms(worst.seconds)}, and"
            f" {in_ms(worst.fp32_s)} in fp32",
        )
    products = f"the products {in_ms(product_s)}"
    casts_s = sum(site.seconds for site in cast_sites(step))
    if casts_s > 0.2 * all_s:
        return SlowReason("casts", f"in one recorded step casts take {in_ms(casts_s)}, and {products}")
    if all_s - product_s <= product_s:
        return None
    text = f"in one recorded step all other operations take {in_ms(all_s - product_s)}, and {products}"
    return SlowReason("other operations", text)


def _find(seen: Seen) -> Iterator[Finding]:
    step, decision = seen.step, seen.decision
    speed, support = speed_up(step), seen.machine.format(step.precision)
    if speed is None or step.precision == FP32 or (support is not None and support.support == "emulated"):
        return  # emulation is a finding of its own, with the same reason
    reason, products = reason_of(step), seen.machine.speed(step.precision)
    if decision.use == FP32:
        if reason is not None and reason.cause != "kernel" and _is_small(step, products):
            yield _too_small(seen, products, speed, "warning")
        else:
            text = f"A step is {in_fp32(speed)}: {_why(reason, products, step)}."
            action = f'Use `AmpPrecision("{FP32}")`. {_larger(step)}'.strip()
            yield Finding("warning", "not-faster", text, action, step.fp32_product_share)
        return
    if _is_explained(seen) or speed.claim not in ("same", "undecided"):
        return
    severity: Severity = "warning" if speed.claim == "same" else "note"
    if products is not None and products.claim in ("slower", "same"):
        text = f"Matrix products in {step.precision} are {in_fp32(products)}: no step gains speed from them here."
        yield Finding("note", "no-faster-products", text, "", 0.5)
    elif _is_small(step, products):
        yield _too_small(seen, products, speed, severity)
    elif products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) >= _LARGE:
        text = (
            f"A step is no faster than in fp32 beyond what the rounds show ({speed}), although"
            f" {percent(step.fp32_product_share)} of one in fp32 are products that half precision could make faster:"
            f" {_why(reason, products, step)}."
        )
        action = _larger(step) or "Try `torch.compile`, which merges the operations around the products."
        yield Finding("note", "not-faster", text, action, step.fp32_product_share)


def _is_explained(seen: Seen) -> bool:
    """Return whether another finding says already why products run in fp32, or are cast."""
    return any(finding.is_problem for rule in (FP32_PRODUCTS, MANY_CASTS) for finding in rule.find(seen))


def _is_small(step: Step, products: SpeedComparison | None) -> bool:
    return products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) < _SMALL


def _too_small(seen: Seen, products: SpeedComparison | None, speed: SpeedComparison, severity: Severity) -> Finding:
    step = seen.step
    best = 1.0 if products is None else best_speed_up(step, products.ratio)
    text = (
        f"Matrix products that half precision could make faster are {percent(step.fp32_product_share)} of a step in"
        f" fp32, so that they alone make it {times_as_fast(best)} at best; measured: {speed}."
    )
    stay = f'Use `AmpPrecision("{FP32}")`.' if seen.decision.use == FP32 else ""
    other = "" if stay else "Try `torch.compile`, which merges the small operations."
    action = f"{stay} {_larger(step) or other}".strip()
    return Finding(severity, "model-too-small", text, action, 1 - step.fp32_product_share)


def _why(reason: SlowReason | None, products: SpeedComparison | None, step: Step) -> str:
    if (reason is None or reason.cause != "kernel") and products is not None and products.claim in ("slower", "same"):
        return f"large matrix products in {step.precision} are {in_fp32(products)} on this device"
    if reason is not None:
        return reason.text
    product_ms = rounded(step.recorded.product_s * 1e3)
    return f"products take {product_ms} of {in_ms(step.recorded.seconds)} of a recorded step"


def _larger(step: Step) -> str:
    """Advise a larger batch, if one was tried and trains more rows per second."""
    more = more_rows(step)
    if not is_worth_it(more) or more is None or more.ratio < 1.3:
        return ""
    return (
        f"A batch {TIMES_LARGER} times as large, tried here in {step.precision}, trains its rows {more} (the learning"
        " rate goes with the batch size)."
    )


NOT_FASTER = StepRule(_find, {"slower": slower_products})
