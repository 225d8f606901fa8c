"""`not-faster`, `model-too-small` and `no-faster-products`: a step or matrix products gain no speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._text import percent, rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.advice._gains import best_speed_up, is_worth_it, more_rows, speed_up
from lightning_amp.advice._machine import Machine, Product
from lightning_amp.advice._record import TIMES_LARGER, Step
from lightning_amp.advice.findings._finding import Evidence, Finding, Severity
from lightning_amp.advice.findings._fp32_products import products_in_fp32
from lightning_amp.advice.findings._many_casts import cast_sites, many_casts
from lightning_amp.advice.findings._words import in_fp32, in_ms, recommendation
from lightning_amp.measure import BACKWARD, FORWARD, SpeedComparison, times_as_fast

_SMALL, _LARGE = 1.35, 1.5
"""Possible speed-ups from faster products: below the first number, a module is too small.

From the second number on, a gain can be expected.
"""
_MOST = 8
"""Number of slow products to keep."""


@final
@dataclass(frozen=True)
class SlowProduct:
    """Matrix products at one place (a module, or `"backward"`) that take longer in a step than in fp32."""

    where: str
    operation: str
    seconds: float
    fp32_s: float


def slower_products(step: Step) -> tuple[SlowProduct, ...]:
    """Return the products that take longer than in fp32, the largest loss first."""
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
    """The part of a recorded step that makes it slow, and a text with its times.

    The cause `"kernel"` is a matrix product that takes longer than in fp32.
    """

    cause: Literal["kernel", "casts", "other operations"]
    text: str


def reason_of(step: Step) -> SlowReason | None:
    """Return why one recorded step is slow; `None` if the record shows no cause."""
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


def not_faster(evidence: Evidence) -> Iterator[Finding]:
    """Yield at most one finding: a warning if fp32 is recommended, else only if no other finding explains the step."""
    step, decision = evidence.step, evidence.decision
    speed, support = speed_up(step), evidence.machine.format(step.precision)
    if speed is None or step.precision == FP32 or (support is not None and support.support == "emulated"):
        return  # `emulated-precision` reports the same reason
    reason, product = reason_of(step), evidence.machine.compared_product(step.precision)
    products = None if product is None else product.speed
    if decision.use == FP32:
        if reason is not None and reason.cause != "kernel" and _is_small(step, products):
            yield _too_small(evidence, products, speed, "warning")
        else:
            text = f"A step is {in_fp32(speed)}: {_why(reason, products, step)}."
            action = f'Use `AmpPrecision("{FP32}")`. {_larger(step)}'.strip()
            yield Finding("warning", "not-faster", text, action, step.fp32_product_share)
        return
    if _is_explained(evidence) or speed.claim not in ("same", "undecided"):
        return
    severity: Severity = "warning" if speed.claim == "same" else "note"
    if product is not None and products is not None and products.claim in ("slower", "same"):
        yield Finding("note", "no-faster-products", _gain_nothing(product, products), "", 0.5)
    elif _is_small(step, products):
        yield _too_small(evidence, products, speed, severity)
    elif products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) >= _LARGE:
        text = (
            f"The race does not show that a step is faster than in fp32 ({speed}). Products that half precision could"
            f" make faster are {percent(step.fp32_product_share)} of a step in fp32,"
            f" but {_why(reason, products, step)}."
        )
        action = _larger(step) or "Try `torch.compile`, which merges the operations around the products."
        yield Finding("note", "not-faster", text, action, step.fp32_product_share)


def _is_explained(evidence: Evidence) -> bool:
    """Return whether another finding already names products in fp32 or casts as the cause."""
    return any(finding.is_problem for finding in (*products_in_fp32(evidence), *many_casts(evidence)))


def _is_small(step: Step, products: SpeedComparison | None) -> bool:
    return products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) < _SMALL


def _too_small(
    evidence: Evidence, products: SpeedComparison | None, speed: SpeedComparison, severity: Severity
) -> Finding:
    step = evidence.step
    best = 1.0 if products is None else best_speed_up(step, products.ratio)
    text = (
        f"Matrix products that half precision could make faster are {percent(step.fp32_product_share)} of a step in"
        f" fp32. They alone make a step {times_as_fast(best)} at best; measured: {speed}."
    )
    stay = f'Use `AmpPrecision("{FP32}")`.' if evidence.decision.use == FP32 else ""
    other = "" if stay else "Try `torch.compile`, which merges the small operations."
    action = f"{stay} {_larger(step) or other}".strip()
    return Finding(severity, "model-too-small", text, action, 1 - step.fp32_product_share)


def _why(reason: SlowReason | None, products: SpeedComparison | None, step: Step) -> str:
    if (reason is None or reason.cause != "kernel") and products is not None and products.claim in ("slower", "same"):
        return f"large matrix products in {step.precision} are {in_fp32(products)} on this device"
    if reason is not None:
        return reason.text
    return f"products take {in_ms(step.recorded.product_s)} of the {in_ms(step.recorded.seconds)} of a recorded step"


def _larger(step: Step) -> str:
    """Advise a larger batch if one was tried and trains 30 % more rows per second; else return an empty text."""
    more = more_rows(step)
    if not is_worth_it(more) or more is None or more.ratio < 1.3:
        return ""
    return (
        f"A batch {TIMES_LARGER} times as large, tried here in {step.precision}, trains its rows {more} (scale the"
        " learning rate with the batch size)."
    )


def no_faster_products(machine: Machine, decision: Decision) -> Iterator[Finding]:
    """Yield the finding for the examined format if no step was examined."""
    chosen, product = machine.format(decision.looked_at), machine.compared_product(decision.looked_at)
    if chosen is None or product is None or product.speed is None or decision.looked_at == FP32:
        return
    if chosen.support not in ("native", "partial") or product.speed.claim not in ("slower", "same"):
        return
    action = recommendation(decision) if decision.advises_against else ""
    yield Finding("warning", "no-faster-products", _gain_nothing(product, product.speed), action, 0.9)


def _gain_nothing(product: Product, speed: SpeedComparison) -> str:
    """Say that matrix products are no faster than in fp32."""
    return (
        f"Matrix products in {product.format} of {product.size} rows and columns reach"
        f" {rounded(product.tflops)} TFLOP/s ({in_fp32(speed)}): they gain no speed here."
    )
