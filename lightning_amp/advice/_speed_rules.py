"""Why a training step is not faster in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._findings import Finding, Severity
from lightning_amp.advice._gains import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
    Gain,
    best_speed_up,
    gain,
    speed_up,
)
from lightning_amp.advice._machine_facts import Machine
from lightning_amp.advice._step_facts import Loading, Reason, Step

_MS = 1e3


def speed_findings(step: Step, machine: Machine) -> Iterator[Finding]:
    """Yield what costs time."""
    known = [*_fp32_products(step), *_fp32_modules(step), *_casts(step)]
    yield from known
    yield from _data(step)
    yield from _sizes(step)
    yield from _optimizer(step)
    yield from _channels_last(step)
    yield from _waits(step, machine)
    yield from _callbacks(step)
    yield from _settings(step)
    support = machine.format(step.precision)
    emulated = support is not None and support.support != "native"
    if not emulated and not any(finding.is_problem for finding in known):  # these say why already
        yield from _too_small(step, machine)


def _total(step: Step) -> float:
    return sum(step.parts.values())


def _share(step: Step, part: str) -> float:
    return step.parts.get(part, 0.0) / max(_total(step), 1e-12)


# -- data --------------------------------------------------------------------------------------------------------------


def _data(step: Step) -> Iterator[Finding]:
    share, wait_s = _share(step, "data"), step.parts.get("data", 0.0)
    if share < 0.1 or wait_s < 2e-4:
        return
    wait = f"A step waits {rounded(wait_s * _MS)} ms for its batch, {percent(share)} of its time"
    text = f"{wait}; no precision helps there."
    action = _for_loading(step.loading)
    yield Finding("warning" if share >= 0.25 else "note", "data-bound", text, action, share)


def _for_loading(loading: Loading | None) -> str:
    if loading is None:
        return "Make the loader faster: decode and collate in worker processes, or ahead of time."
    if loading.workers and not loading.persistent and loading.restart_s > 0.5 * loading.wait_s:
        return (
            f"Pass `persistent_workers=True` to the DataLoader: starting {counted(loading.workers, 'worker')} at each"
            f" epoch takes {rounded(loading.restart_s * _MS)} ms of a step."
        )
    if not loading.tried:
        return "Pass `num_workers=...` to the DataLoader, or do less per item (decode once, and save the result)."
    workers, seconds = min(loading.tried, key=lambda pair: pair[1])
    if seconds < 0.7 * loading.wait_s:
        stay = ", persistent_workers=True" if workers else ""
        return (
            f"Pass `num_workers={workers}{stay}` to the DataLoader: tried here, a batch then takes"
            f" {rounded(seconds * _MS)} ms."
        )
    others = ", ".join(f"{number}: {rounded(s * _MS)} ms" for number, s in loading.tried)
    return (
        f"Other numbers of workers do not help (tried here, per batch: {others}). Do less per item, or fetch whole"
        " batches at once: a dataset with `__getitems__`, or one that indexes tensors by batch."
    )


# -- what stays in fp32 ------------------------------------------------------------------------------------------------


def _fp32_products(step: Step) -> Iterator[Finding]:
    total = sum(sum(by_dtype.values()) for by_dtype in step.module_flops.values())
    for why, code, what, advice in (
        (
            "autocast off", "autocast-off", "run where autocast is turned off",
            "Take that region out, or keep only the operation in it that needs fp32; what needs it in a module of its"
            " own can be named in `fp32_modules`.",
        ),
        (
            "float64", "float64", "are computed in float64, which autocast leaves alone",
            "Make the tensors float32: `.float()` on what is loaded, and no `torch.float64` constants.",
        ),
        (
            "not on autocast's list", "not-on-autocast-list",
            "run in operations that autocast does not compute in half precision",
            "Write them as `matmul`, `linear` or a convolution, which it does.",
        ),
        (
            "attention in fp32", "attention-in-fp32",
            "are attention that torch computes step by step in fp32, since no fused kernel takes these arguments",
            "Call it with what a fused kernel takes: without dropout on a CPU, and without returning its weights.",
        ),
    ):  # fmt: skip
        own = [reason for reason in step.reasons if reason.why == why]
        share = sum(reason.flops for reason in own) / max(total, 1)
        if share >= 0.02:
            text = f"{percent(share)} of the FLOPs of the forward {what}: {_places(own)}."
            yield Finding(_graded(share, 0.1), code, text, advice, share)


def _places(reasons: list[Reason]) -> str:
    more = f", and in {counted(len(reasons) - 2, 'other place')}" if len(reasons) > 2 else ""
    return "; ".join(reason.where or "the module itself" for reason in reasons[:2]) + more


def _graded(share: float, warning: float) -> Severity:
    return "warning" if share >= warning else "note"


def _fp32_modules(step: Step) -> Iterator[Finding]:
    total = sum(sum(by_dtype.values()) for by_dtype in step.module_flops.values())
    own = [reason for reason in step.reasons if reason.why == "fp32_modules"]
    share = sum(reason.flops for reason in own) / max(total, 1)
    if share < 0.1:
        return
    without = gain(step, WITHOUT_RULES)
    text = (
        f"`fp32_modules` keeps {percent(share)} of the FLOPs of the forward in fp32, most of them in `{own[0].where}`"
    )
    clear = share >= 0.5
    if without is not None:
        text += f"; without it a step is {without.words}"
        clear = without.is_clear
    action = "Name fewer modules: `find_fp32_modules` searches for the smallest set that keeps the gradients."
    yield Finding("warning" if clear else "note", "fp32-modules-dominate", f"{text}.", action, share)


# -- casts and sizes ---------------------------------------------------------------------------------------------------


def _casts(step: Step) -> Iterator[Finding]:
    beyond = [site for site in step.casts if site.kind in ("explicit", "weight again")]
    count = sum(site.count for site in beyond)
    if not count:
        return
    share = sum(site.seconds for site in beyond) / max(step.recorded_s, 1e-12)
    if share < 0.01 and count < 6:
        return
    size = sum(site.num_bytes for site in beyond)
    worst = beyond[0]
    what = "casts of your own" if worst.kind == "explicit" else "casts of weights that were cast already"
    text = (
        f"{count} {what} in a step, beyond autocast's one per weight, write {memory(size)} and take {percent(share)} of"
        f" the time in operations; most at {worst.where or 'the module itself'}."
    )
    action = (
        "Take the casts out: autocast casts where an operation needs it, and keeps what it is given elsewhere."
        if worst.kind == "explicit"
        else "Call the module once on all rows instead of once per row, so that its weight is cast once."
    )
    yield Finding(_graded(share, 0.1), "many-casts", text, action, share)


def _sizes(step: Step) -> Iterator[Finding]:
    total = sum(step.flops.values())
    share = sum(found.flops for found in step.unaligned) / max(total, 1)
    if share < 0.05:
        return
    as_is = step.variant(AS_IT_IS)
    step_s = min(as_is.step_s) if as_is is not None else max(_total(step), 1e-12)
    saved = sum(max(0.0, found.seconds - found.padded_seconds) for found in step.unaligned if found.seconds)
    gained = saved / max(step_s, 1e-12)
    worst = step.unaligned[0]
    before, after = (" x ".join(map(str, sizes)) for sizes in (worst.sizes, worst.padded))
    text = (
        f"{percent(share)} of the FLOPs are products with sizes that are no multiples of {step.alignment}, most in"
        f" `{worst.module}` ({before}); padded to {after} they would save {percent(min(1.0, gained))} of a step,"
        " measured product by product."
    )
    action = (
        f"Pad vocabularies, features and sequence lengths to multiples of {step.alignment}"
        f" ({_pads(worst.sizes, worst.padded)})."
    )
    yield Finding(_graded(gained, 0.05), "sizes-not-aligned", text, action, max(gained, 0.01))


def _pads(sizes: tuple[int, int, int], padded: tuple[int, int, int]) -> str:
    return ", ".join(f"{a} to {b}" for a, b in zip(sizes, padded, strict=True) if a != b)


# -- optimizer, layout -------------------------------------------------------------------------------------------------


def _optimizer(step: Step) -> Iterator[Finding]:
    share = _share(step, "optimizer")
    plain = [optimizer for optimizer in step.optimizers if optimizer.can_fuse]
    fused = gain(step, FUSED)
    if not plain or (share < 0.05 and not (fused and fused.is_clear)):
        return
    name = plain[0].name
    text = f"`{name}` takes {percent(share)} of a step, in several kernels"
    if fused is not None:
        text += f"; with `fused=True`, tried here, a step is {fused.words}"
    clear = fused is not None and fused.is_clear
    action = f"Pass `fused=True`: `torch.optim.{name}(..., fused=True)`."
    if fused is not None and not clear:
        action = _left(fused, "`fused=True`")
    saved = 1 - 1 / fused.ratio if fused is not None and clear else 0.0
    yield Finding("warning" if clear else "note", "optimizer-not-fused", f"{text}.", action, saved)


def _left(tried: Gain, what: str) -> str:
    """Say what follows from a gain that is not clear."""
    if tried.is_sure and tried.high < 1.05:
        return f"Leave it as it is: {what} gains nothing here."
    return f"Undecided: the figures are too noisy. Try {what} again on a quiet machine, by hand."


def _channels_last(step: Step) -> Iterator[Finding]:
    forward = sum(sum(by_dtype.values()) for by_dtype in step.module_flops.values())
    share = min(1.0, step.convolutions / max(forward, 1))
    if step.channels_last or share < 0.1:
        return
    tried = gain(step, CHANNELS_LAST)
    text = f"{percent(share)} of the FLOPs of the forward are convolutions whose images have the channels first"
    if tried is None:
        yield Finding("note", "channels-last", f"{text}.", "Try `module.to(memory_format=torch.channels_last)`.", 0.01)
        return
    text += f"; with channels_last, tried here, a step is {tried.words}."
    action = "Write `self.to(memory_format=torch.channels_last)` at the end of the module's `__init__`."
    if not tried.is_clear:
        action = _left(tried, "channels_last")
    saved = 1 - 1 / tried.ratio if tried.is_clear else 0.0
    yield Finding("warning" if tried.is_clear else "note", "channels-last", text, action, saved)


# -- the host ----------------------------------------------------------------------------------------------------------


def _waits(step: Step, machine: Machine) -> Iterator[Finding]:
    own = [wait for wait in step.waits if wait.by_user]
    count = sum(wait.count for wait in own)
    if not count:
        return
    on_cpu = machine.device_type == "cpu"
    often = counted(count, "time")
    text = f"The host reads a value from the device {often} in a step: {own[0].operation} in {own[0].where}"
    if len(own) > 1:
        text += f", and in {counted(len(own) - 1, 'other place')}"
    text += ". On a CPU that is free; on a GPU each one waits for all that was queued." if on_cpu else "."
    action = "Keep it on the device (`.detach()` instead of `.item()`), and log with `self.log`, which waits seldom."
    severity: Severity = "note" if on_cpu or count < 2 else "warning"
    yield Finding(severity, "host-waits", text, action, 0.0 if on_cpu else min(0.3, 0.02 * count))


def _callbacks(step: Step) -> Iterator[Finding]:
    share = _share(step, "callbacks")
    if share < 0.1:
        return
    name, seconds = max(step.callbacks.items(), key=lambda item: item[1])
    text = f"Callbacks take {percent(share)} of a step, most of it `{name}`: {rounded(seconds * _MS)} ms."
    yield Finding(_graded(share, 0.2), "slow-callback", text, "Let it work less often, or outside of training.", share)


def _settings(step: Step) -> Iterator[Finding]:
    if "anomaly detection" in step.settings:
        text = "Anomaly detection is on (`detect_anomaly=True`): it checks every gradient and keeps every stack."
        yield Finding("warning", "anomaly-detection", text, "Turn it off, but to search for a NaN.", 0.5)
    if "deterministic algorithms" in step.settings:
        text = "Deterministic algorithms are on, which may be several times as slow."
        yield Finding("note", "deterministic", text, "Turn `deterministic` off where you do not need the same bits.")


# -- nothing to gain ---------------------------------------------------------------------------------------------------


def _too_small(step: Step, machine: Machine) -> Iterator[Finding]:
    measured, products = speed_up(step), machine.gain(step.precision)
    if measured is None or step.precision == "fp32" or products <= 1:
        return
    best, share = best_speed_up(step, products), step.fp32_product_share
    if best < 1.35 and not measured.is_clear and measured.ratio < max(1.05, best + 0.15):
        seen = measured.words if measured.ratio <= best else "no difference beyond noise"
        text = (
            f"Matrix products that half precision could make faster are {percent(share)} of a step in fp32, so that at"
            f" best {rounded(best)} times the speed is possible; measured: {seen}."
        )
        severity: Severity = "warning" if measured.ratio <= 1.02 and measured.is_sure else "note"
        yield Finding(severity, "model-too-small", text, _larger_or_fp32(step), 1 - share)
    elif measured.is_loss or (best >= 1.5 and measured.is_sure and not measured.is_clear):
        text = (
            f"A step is {measured.words} as in fp32, although {percent(share)} of one in fp32 are products that half"
            f" precision could make faster: {_instead(step)}."
        )
        yield Finding("warning" if measured.is_loss else "note", "not-faster", text, _for_slow(step), share)


def _larger_or_fp32(step: Step) -> str:
    return (
        _larger(step) + " Or stay in fp32."
        if _larger(step)
        else ('Stay in "fp32", which is as fast here, or try `torch.compile`, which merges the small operations.')
    )


def _larger(step: Step) -> str:
    """Advise a larger batch, if one was tried and trains more rows per second."""
    larger = gain(step, LARGER_BATCH)
    more = larger.ratio * TIMES_LARGER if larger is not None else 0.0
    if more < 1.3:
        return ""
    return (
        f"Use a larger batch: {TIMES_LARGER} times as many rows train {rounded(more)} times as many per second, tried"
        " here (the learning rate goes with the batch size)."
    )


def _instead(step: Step) -> str:
    casts = sum(site.seconds for site in step.casts)
    lost = sum(product.seconds - product.fp32_s for product in step.slower)
    rest = max(0.0, step.recorded_s - step.product_s)
    if step.slower and lost > 0.3 * step.product_s:
        worst = step.slower[0]
        return (
            f"`{worst.operation}` in {'the' if worst.where == 'backward' else 'module'} `{worst.where}` takes"
            f" {rounded(worst.seconds * _MS)} ms, and {rounded(worst.fp32_s * _MS)} ms in fp32"
        )
    if casts > 0.2 * step.recorded_s:
        return f"casts take {rounded(casts * _MS)} ms, and the products {rounded(step.product_s * _MS)} ms"
    return f"all other operations take {rounded(rest * _MS)} ms, and the products {rounded(step.product_s * _MS)} ms"


def _for_slow(step: Step) -> str:
    lost = sum(product.seconds - product.fp32_s for product in step.slower)
    if step.slower and lost > 0.3 * step.product_s:
        return "The kernels of this version of torch for it are slow here, or the machine was busy: time it by itself."
    return _larger(step) or "Try `torch.compile`, which merges the operations around the products."
