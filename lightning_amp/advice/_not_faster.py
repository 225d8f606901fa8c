"""Why a step in mixed precision is no faster than in fp32, although nothing else explains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._text import percent, rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.advice._findings import Finding, Severity
from lightning_amp.advice._gains import TIMES_LARGER, best_speed_up, in_fp32, is_worth_it, more_rows, speed_up
from lightning_amp.advice._machine_facts import Machine
from lightning_amp.advice._step_facts import Step
from lightning_amp.measure import SpeedComparison, times_as_fast

_MS = 1e3
_SMALL, _LARGE = 1.35, 1.5
"""A step whose products allow less than the first is too small; from the second on, more was to be expected."""


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
    lost = sum(product.seconds - product.fp32_s for product in step.slower)
    if step.slower and lost > 0.3 * step.product_s and lost > 0.1 * step.recorded_s:
        worst = step.slower[0]
        return SlowReason(
            "kernel",
            f"in one recorded step of each, `{worst.operation}`"
            f" {f'in module `{worst.where}`' if worst.where != 'backward' else 'in the backward'} takes"
            f" {rounded(worst.seconds * _MS)} ms, and {rounded(worst.fp32_s * _MS)} ms in fp32",
        )
    products = f"the products {rounded(step.product_s * _MS)} ms"
    casts = sum(site.seconds for site in step.casts)
    if casts > 0.2 * step.recorded_s:
        return SlowReason("casts", f"in one recorded step casts take {rounded(casts * _MS)} ms, and {products}")
    rest = step.recorded_s - step.product_s
    if rest <= step.product_s:
        return None
    text = f"in one recorded step all other operations take {rounded(rest * _MS)} ms, and {products}"
    return SlowReason("other operations", text)


def not_faster(step: Step, machine: Machine, decision: Decision, *, is_explained: bool) -> Iterator[Finding]:
    """Yield why the step is slower than in fp32, or no faster.

    Args:
        step: What was measured.
        machine: The one that it was measured on.
        decision: What is recommended.
        is_explained: Whether another finding says already why products run in fp32, or are cast.

    """
    speed, support = speed_up(step), machine.format(step.precision)
    if speed is None or step.precision == FP32 or (support is not None and support.support == "emulated"):
        return  # emulation is a finding of its own, with the same reason
    reason, products = reason_of(step), machine.speed(step.precision)
    if decision.use == FP32:
        if reason is not None and reason.cause != "kernel" and _is_small(step, products):
            yield _too_small(step, products, speed, decision, "warning")
        else:
            text = f"A step is {in_fp32(speed)}: {_why(reason, products, step)}."
            action = f'Use `AmpPrecision("{FP32}")`. {_larger(step)}'.strip()
            yield Finding("warning", "not-faster", text, action, step.fp32_product_share)
        return
    if is_explained or speed.claim not in ("same", "undecided"):
        return
    severity: Severity = "warning" if speed.claim == "same" else "note"
    if products is not None and products.claim in ("slower", "same"):
        text = f"Matrix products in {step.precision} are {in_fp32(products)}: no step gains speed from them here."
        yield Finding("note", "no-faster-products", text, "", 0.5)
    elif _is_small(step, products):
        yield _too_small(step, products, speed, decision, severity)
    elif products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) >= _LARGE:
        text = (
            f"A step is no faster than in fp32 beyond what the rounds show ({speed}), although"
            f" {percent(step.fp32_product_share)} of one in fp32 are products that half precision could make faster:"
            f" {_why(reason, products, step)}."
        )
        action = _larger(step) or "Try `torch.compile`, which merges the operations around the products."
        yield Finding("note", "not-faster", text, action, step.fp32_product_share)


def _is_small(step: Step, products: SpeedComparison | None) -> bool:
    return products is not None and products.claim == "faster" and best_speed_up(step, products.ratio) < _SMALL


def _too_small(
    step: Step, products: SpeedComparison | None, speed: SpeedComparison, decision: Decision, severity: Severity
) -> Finding:
    best = 1.0 if products is None else best_speed_up(step, products.ratio)
    text = (
        f"Matrix products that half precision could make faster are {percent(step.fp32_product_share)} of a step in"
        f" fp32, so that they alone make it {times_as_fast(best)} at best; measured: {speed}."
    )
    stay = f'Use `AmpPrecision("{FP32}")`.' if decision.use == FP32 else ""
    other = "" if stay else "Try `torch.compile`, which merges the small operations."
    action = f"{stay} {_larger(step) or other}".strip()
    return Finding(severity, "model-too-small", text, action, 1 - step.fp32_product_share)


def _why(reason: SlowReason | None, products: SpeedComparison | None, step: Step) -> str:
    if (reason is None or reason.cause != "kernel") and products is not None and products.claim in ("slower", "same"):
        return f"large matrix products in {step.precision} are {in_fp32(products)} on this device"
    if reason is not None:
        return reason.text
    return f"products take {rounded(step.product_s * _MS)} of {rounded(step.recorded_s * _MS)} ms of a recorded step"


def _larger(step: Step) -> str:
    """Advise a larger batch, if one was tried and trains more rows per second."""
    more = more_rows(step)
    if not is_worth_it(more) or more is None or more.ratio < 1.3:
        return ""
    return (
        f"A batch {TIMES_LARGER} times as large, tried here in {step.precision}, trains its rows {more} (the learning"
        " rate goes with the batch size)."
    )
