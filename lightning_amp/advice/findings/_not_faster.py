"""`emulated-precision`, `model-too-small`: mixed precision is not faster."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from lightning_amp._text import percent, rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._part_timer import FORWARD
from lightning_amp.advice._step import (
    IN_FP32,
    Step,
)
from lightning_amp.advice.findings._finding import (
    FP32,
    Decision,
    Finding,
    Severity,
    duration,
    in_fp32,
    use_instead,
)
from lightning_amp.advice.findings._products import autocast_off, fp32_modules_dominate, many_casts
from lightning_amp.measure import times_as_fast

_SMALL = 1.35
"""If faster products can make a step this much faster at best, the module is too small."""
_INEFFICIENT = 3.0
"""The time of a small product is capped at this multiple of the seconds that the device needs for its FLOPs."""


def product_share(step: Step, machine: Machine) -> float:
    """Return the share of a step in fp32 that half precision could make faster: its matrix products.

    A small product takes the time of a call, however few FLOPs it has, so its time is limited by its FLOPs.
    """
    recorded, timed, best = step.fp32_recorded, step.variant(IN_FP32), machine.best_tflops(FP32)
    if recorded is None or timed is None or not best:
        return 0.0
    at_best_s = sum(recorded.flops.values()) / best / 1e12
    whole = max(median(timed.step_s), recorded.seconds)  # the recorded step may be slower, on a busy machine
    return min(1.0, min(recorded.product_s, _INEFFICIENT * at_best_s) / whole)


def best_speed_up(step: Step, machine: Machine) -> float:
    """Return the highest possible speed-up (Amdahl), if products are as fast as large ones are; 1 if unknown."""
    share, products = product_share(step, machine), machine.speed(step.precision)
    return 1 / (1 - share + share / products.ratio) if products is not None and products.ratio > 1 else 1.0


def slowest_product(step: Step) -> str:
    """Write which product takes longer than in fp32, if such products cost a tenth of a step; else an empty text."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, recorded in enumerate((step.recorded, step.fp32_recorded)):
        for operation in recorded.of_the_module if recorded is not None else ():
            if operation.flops:
                where = f"module `{operation.module}`" if operation.part == FORWARD else f"the {operation.part}"
                seconds[where, operation.name][number] += operation.seconds
    lost = {place: own - full for place, (own, full) in seconds.items() if own > full > 0}
    if not lost or sum(lost.values()) <= max(0.3 * step.recorded.product_s, 0.1 * step.recorded.seconds):
        return ""
    where, name = max(lost, key=lambda place: lost[place])
    own, full = map(duration, seconds[where, name])
    return f"in one recorded step of each, `{name}` in {where} takes {own}, and {full} in fp32"


def emulated_precision(step: Step | None, machine: Machine, decision: Decision) -> Finding | None:
    """Find a precision that the device cannot run, emulates, or runs slower than fp32."""
    found, product = machine.format(decision.looked_at), machine.product(decision.looked_at)
    if found is None or found.name == FP32:
        return None
    if found.support == "missing":
        text = f"{machine.device} has no {found.name}: {found.reason}."
        return Finding("error", "emulated-precision", text, use_instead(decision), 1.0)
    speed = product.speed if product is not None else None
    against = decision.use not in (None, found.name)
    kernel = slowest_product(step) if step is not None and against else ""
    gains_nothing = speed is not None and speed.claim in ("slower", "same")
    if found.support == "native" and not (against and (kernel or gains_nothing)):
        return None
    text = f"{found.name} is {'emulated' if found.support == 'emulated' else 'slow'} here ({found.reason})"
    if product is not None and speed is not None:
        text += f": its matrix products of {product.size} rows and columns reach {rounded(product.tflops)} TFLOP/s"
        text += f" ({in_fp32(speed)})"
    if step is not None and decision.speed is not None:
        text += f". A step in it: {in_fp32(decision.speed)}" + (f"; {kernel}" if kernel else "")
    return Finding("error" if against else "note", "emulated-precision", f"{text}.", use_instead(decision), 1.0)


def model_too_small(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find a module whose products are too small a part of a step, if nothing else explains that it is not faster."""
    others = (emulated_precision, autocast_off, many_casts, fp32_modules_dominate)
    explained = any(finding.is_problem for find in others if (finding := find(step, machine, decision)) is not None)
    speed, against, products = decision.speed, decision.use == FP32, machine.speed(step.precision)
    if step.precision == FP32 or speed is None or explained:
        return None
    best, is_faster = best_speed_up(step, machine), products is not None and products.claim == "faster"
    if not against and not (speed.claim in ("same", "undecided") and is_faster and best < _SMALL):
        return None
    text = (
        f"Matrix products that half precision could make faster are {percent(product_share(step, machine))} of a step"
        f" in fp32. They alone make a step {times_as_fast(best)} at best; measured: {speed}."
    )
    action = f"{use_instead(decision)} A larger batch gives products more work (`find_batch_size`; not tried here)."
    severity: Severity = "warning" if against or speed.claim == "same" else "note"
    return Finding(severity, "model-too-small", text, action.strip(), 1 - product_share(step, machine))
