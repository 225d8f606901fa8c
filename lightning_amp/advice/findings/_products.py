"""Findings about matrix products: in fp32, with casts around them, not aligned, slower than in fp32, or too few."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._machine import Machine, Sizes
from lightning_amp.advice._step import AS_IT_IS, FORWARD, IN_FP32, Operation, Step, Unaligned
from lightning_amp.advice.findings._finding import (
    FP32,
    Decision,
    Finding,
    Severity,
    duration,
    graded,
    in_fp32,
    is_worth_it,
    use_instead,
)
from lightning_amp.measure import times_as_fast

_WHY = {
    "off": (
        "where autocast is turned off",
        "Take that region out, or keep only the operation in it that needs fp32. If that operation is a module of its"
        " own, name it in `fp32_modules` instead.",
    ),
    "float64": (
        "in float64, which autocast leaves alone",
        "Make the tensors float32: `.float()` on what is loaded, and no `torch.float64` constants.",
    ),
    "attention": (
        "in attention that torch computes step by step in fp32, since no fused kernel takes these arguments",
        "Call it with arguments that a fused kernel takes: no dropout on a CPU, and no returned attention weights.",
    ),
    "not listed": (
        "in operations that autocast does not compute in half precision",
        "Write them as `matmul`, `linear` or a convolution: autocast runs these in half precision.",
    ),
}
"""Why products stay in full precision, in words, and what to do."""


def fp32_products(step: Step) -> dict[str, Counter[str]]:
    """Return the FLOPs of the forward that are computed in fp32 or float64, by reason and place."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for operation in step.recorded.of_the_module if step.precision != FP32 else ():
        if operation.flops and operation.dtype in ("float32", "float64") and operation.part == FORWARD:
            why = "not listed"
            if operation.in_fp32_module:
                why = "fp32_modules"
            elif operation.dtype == "float64":
                why = "float64"
            elif not operation.autocast:
                why = "off"
            elif "attention" in operation.asked:
                why = "attention"
            place = operation.module if why == "fp32_modules" else str(operation.place or operation.module)
            found[why][f"{operation.name} in {place}" if why == "not listed" else place] += operation.flops
    return found


def _where(step: Step, machine: Machine) -> str:
    """Say that advice for more half precision is for other machines, if its products are not faster here."""
    products = machine.speed(step.precision)
    pays = products is None or products.claim not in ("slower", "same")
    return "" if pays else f"Not on this machine, where {step.precision} is not faster. "


def autocast_off(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find products that stay in fp32, other than by `fp32_modules`, if they are 2 % of the FLOPs of the forward."""
    found = fp32_products(step)
    shares = {why: sum(found[why].values()) / max(step.recorded.forward_flops, 1) for why in _WHY}
    shares = {why: share for why, share in sorted(shares.items(), key=lambda pair: -pair[1]) if share >= 0.02}
    if not shares:
        return None
    reasons = []
    for why, share in shares.items():
        places = [place for place, _ in found[why].most_common()]
        more = f", and {counted(len(places) - 2, 'other place')}" if len(places) > 2 else ""
        part = f"{percent(share)} " if len(shares) > 1 else ""
        reasons.append(f"{part}{_WHY[why][0]} ({'; '.join(places[:2])}{more})")
    total = sum(shares.values())
    text = f"{percent(total)} of the FLOPs of the forward stay in full precision, {', '.join(reasons)}."
    return Finding(graded(total, 0.1), "autocast-off", text, _where(step, machine) + _WHY[next(iter(shares))][1], total)


def fp32_modules_dominate(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find `fp32_modules` that hold a tenth of the FLOPs of the forward."""
    found = fp32_products(step)["fp32_modules"]
    share = sum(found.values()) / max(step.recorded.forward_flops, 1)
    if share < 0.1:
        return None
    largest = found.most_common(1)[0][0]
    text = f"`fp32_modules` keeps {percent(share)} of the FLOPs of the forward in fp32, most of them in `{largest}`."
    action = "Name fewer modules: `find_fp32_modules` searches for a small set that keeps the gradients."
    return Finding(graded(share, 0.5), "fp32-modules-dominate", text, _where(step, machine) + action, share)


_SLOWEST = 3.0
"""A cast counts as at most this multiple of a usual one."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Torch functions that cast their weights anew for each time step."""
_CASTING = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}


def many_casts(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find casts beyond autocast's own one per weight: six of them, or 1 % of the operations' time."""
    casts = [operation for operation in step.recorded.of_the_module if operation.cast_bytes]
    sites: dict[tuple[bool, str], list[Operation]] = {}
    cast_before: set[int] = set()
    for cast in casts:
        asked, is_forward = cast.asked.rpartition(".")[2], cast.part == FORWARD
        is_again = cast.cast_of in cast_before
        cast_before.update([cast.cast_of] if cast.cast_of else [])
        if is_forward and asked in _CASTING and cast.place and (is_again or not cast.cast_of):
            sites.setdefault((True, str(cast.place)), []).append(cast)
        elif is_forward and is_again and asked not in _RECURRENT:
            sites.setdefault((False, cast.module), []).append(cast)
    if not sites:
        return None
    beyond = [cast for own in sites.values() for cast in own]
    per_call, per_byte = median(c.seconds for c in casts), median(c.seconds / c.cast_bytes for c in casts)
    taken = {  # on a busy machine, one call may take far longer than the others
        site: sum(min(cast.seconds, _SLOWEST * max(per_call, per_byte * cast.cast_bytes)) for cast in own)
        for site, own in sites.items()
    }
    share = sum(taken.values()) / max(step.recorded.seconds, 1e-12)
    if share < 0.01 and len(beyond) < 6:
        return None
    calls = step.recorded.call_s * len(beyond) / max(step.recorded.seconds, 1e-12)  # any small operation costs that
    explicit, where = max(taken, key=lambda site: taken[site])
    what = "casts of your own" if explicit else "casts of weights that were cast already"
    text = (
        f"{len(beyond)} {what} in a step, beyond autocast's one per weight, write"
        f" {memory(sum(cast.cast_bytes for cast in beyond))} and take {percent(share)} of the time in operations; most"
        f" at {where}."
    )
    action = (
        "Take the casts out: autocast casts where an operation needs it, and leaves the format alone elsewhere."
        if explicit
        else "Call the module once on all rows instead of once per row, so that its weight is cast once."
    )
    return Finding(graded(share - calls, 0.1), "many-casts", text, action, share)


_HALF = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_NOT_PADDED = 32
"""A dimension below this (the classes of a head, a single output) is not worth padding."""


def unaligned_products(step: Step) -> Unaligned | None:
    """Return the products whose sizes are not aligned; `None` if there are none."""

    def padded(sizes: Sizes) -> Sizes:
        a, b, c = (n if n < _NOT_PADDED else -(-n // step.alignment) * step.alignment for n in sizes)
        return a, b, c

    groups: defaultdict[tuple[Sizes, str], list[Operation]] = defaultdict(list)
    for operation in step.recorded.of_the_module:
        if operation.sizes and operation.dtype in _HALF and padded(operation.sizes) != operation.sizes:
            groups[operation.sizes, _HALF[operation.dtype]].append(operation)
    if not groups:
        return None
    flops = {key: sum(operation.flops for operation in own) for key, own in groups.items()}
    sizes, name = max(flops, key=lambda key: flops[key])
    module = next((o.module for o in groups[sizes, name] if o.part == FORWARD and o.module), "")
    share = sum(flops.values()) / max(sum(step.recorded.flops.values()), 1)
    return Unaligned(share, sizes, padded(sizes), name, module)


def sizes_not_aligned(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find such products if they are 5 % of the FLOPs; it is a warning if padding saves 5 % of a step."""
    found, as_is = step.unaligned, step.variant(AS_IT_IS)
    if found is None or found.share < 0.05:
        return None
    own, padded = (" x ".join(map(str, sizes)) for sizes in (found.sizes, found.padded))
    text = (
        f"{percent(found.share)} of the FLOPs are products with sizes that are not multiples of {step.alignment}, most"
        f" in {f'`{found.module}`' if found.module else 'the backward'} ({own})"
    )
    pads = ", ".join(f"{a} to {b}" for a, b in zip(found.sizes, found.padded, strict=True) if a != b)
    action = f"Pad vocabularies, features and sequence lengths to multiples of {step.alignment} ({pads})."
    speed, gained = found.padded_speed, 0.0
    if step.precision == "fp8":
        text, action = f"{text}; fp8 needs such multiples", f"{action} Not tried."
    elif speed is not None:
        text += f"; padded to {padded}, measured here: {speed}"
        step_s = median(as_is.step_s) if as_is is not None else max(step.seconds, 1e-12)
        if is_worth_it(speed):
            gained = min(1.0, step.recorded.product_s / step_s) * found.share * (1 - 1 / speed.ratio)
            text += f". If all gain as much, a step saves {percent(gained)}"
        elif speed.claim in ("same", "slower"):
            action = "Leave them as they are: padding gains nothing here."
    return Finding(graded(gained, 0.05), "sizes-not-aligned", f"{text}.", action, max(gained, 0.01))


# -- mixed precision is not faster -------------------------------------------------------------------------------------

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
