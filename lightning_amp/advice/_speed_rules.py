"""Why a training step is not faster in mixed precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._decision import Decision
from lightning_amp.advice._findings import Finding, Severity
from lightning_amp.advice._gains import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    WITHOUT_RULES,
    gain,
    is_worth_it,
    measured,
    most_gain,
)
from lightning_amp.advice._machine_facts import Machine
from lightning_amp.advice._not_faster import not_faster
from lightning_amp.advice._step_facts import Loading, Reason, Step
from lightning_amp.measure import SpeedComparison, times_as_fast

_MS = 1e3
_FASTER_LOADING = 0.7
"""A loader that takes less than this share of the wait is faster: eight noisy batches (20 %) feign it in under 1 %."""


def speed_findings(step: Step, machine: Machine, decision: Decision) -> Iterator[Finding]:
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
    yield from not_faster(step, machine, decision, is_explained=any(finding.is_problem for finding in known))


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
    if loading.is_stream:
        return _for_streams(loading)
    if not loading.tried:
        return "Pass `num_workers=...` to the DataLoader, or do less per item (decode once, and save the result)."
    if better := _with_workers(loading):
        return better
    others = ", ".join(f"{number}: {rounded(s * _MS)} ms" for number, s in loading.tried)
    return (
        f"Other numbers of workers do not help (tried here, per batch: {others}). Do less per item, or fetch whole"
        " batches at once: a dataset with `__getitems__`, or one that indexes tensors by batch."
    )


def _with_workers(loading: Loading) -> str:
    """Advise the number of workers that was fastest, if it was clearly faster than the step's loader."""
    workers, seconds = min(loading.tried, key=lambda pair: pair[1], default=(0, math.inf))
    if seconds >= _FASTER_LOADING * loading.wait_s:
        return ""
    stay = ", persistent_workers=True" if workers else ""
    return (
        f"Pass `num_workers={workers}{stay}` to the DataLoader: tried here, a batch then takes"
        f" {rounded(seconds * _MS)} ms."
    )


def _for_streams(loading: Loading) -> str:
    return _with_workers(loading) or (
        "Do less per item. Pass `num_workers=...` only if the `IterableDataset` gives each worker its own rows"
        " (`torch.utils.data.get_worker_info`): otherwise every worker serves every row."
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
        text += f"; without it, tried here: {without}"
        clear = is_worth_it(without)
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
    step_s = median(as_is.step_s) if as_is is not None else max(_total(step), 1e-12)
    faster = [found for found in step.unaligned if is_worth_it(found.padded_speed)]
    saved = min(sum(found.seconds - found.padded_seconds for found in faster), step.product_s)
    gained = min(1.0, saved / max(step_s, 1e-12))
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
    text += "."
    action = (
        f"Pad vocabularies, features and sequence lengths to multiples of {step.alignment}"
        f" ({_pads(worst.sizes, worst.padded)})."
    )
    if worst.padded_speed is not None and worst.padded_speed.claim in ("same", "slower") and not gained:
        action = "Leave them as they are: padding gains nothing here."
    yield Finding(_graded(gained, 0.05), "sizes-not-aligned", text, action, max(gained, 0.01))


def _pads(sizes: tuple[int, int, int], padded: tuple[int, int, int]) -> str:
    return ", ".join(f"{a} to {b}" for a, b in zip(sizes, padded, strict=True) if a != b)


# -- optimizer, layout -------------------------------------------------------------------------------------------------


def _optimizer(step: Step) -> Iterator[Finding]:
    share = _share(step, "optimizer")
    plain = [optimizer for optimizer in step.optimizers if optimizer.can_fuse]
    fused = gain(step, FUSED)
    clear = is_worth_it(fused)
    if not plain or (share < 0.05 and not clear):
        return
    name = plain[0].name
    text = f"`{name}` takes {percent(share)} of a step, in several kernels; {_tried(step, FUSED, fused)}."
    action = f"Pass `fused=True`: `torch.optim.{name}(..., fused=True)`." if clear else _left(fused, "`fused=True`")
    yield Finding("warning" if clear else "note", "optimizer-not-fused", text, action, _saved(fused))


def _tried(step: Step, label: str, found: SpeedComparison | None) -> str:
    """Say what a change gains: as measured, or at most, where its measurement was noise."""
    if found is not None:
        return f"with `{label}`, tried here: {found}"
    if measured(step, label) is None:
        return f"`{label}` was not timed"
    most = times_as_fast(most_gain(step, label))
    return f"`{label}` can make a step {most} at most, and its rounds show more, which is noise"


def _left(tried: SpeedComparison | None, what: str) -> str:
    """Say what follows from a gain that is not worth it."""
    if tried is None or tried.claim in ("undecided", "one run"):
        return f"Undecided. Time {what} by itself, on a quiet machine."
    return f"Leave it as it is: {what} gains {'little' if tried.claim == 'faster' else 'less than 5 %'} here."


def _saved(found: SpeedComparison | None) -> float:
    """Return which share of a step a change saves."""
    return 1 - 1 / found.ratio if found is not None and is_worth_it(found) else 0.0


def _channels_last(step: Step) -> Iterator[Finding]:
    forward = sum(sum(by_dtype.values()) for by_dtype in step.module_flops.values())
    share = min(1.0, step.convolutions / max(forward, 1))
    if step.channels_last or share < 0.1:
        return
    tried = gain(step, CHANNELS_LAST)
    clear = is_worth_it(tried)
    text = (
        f"{percent(share)} of the FLOPs of the forward are convolutions whose images have the channels first;"
        f" {_tried(step, CHANNELS_LAST, tried)}."
    )
    action = "Write `self.to(memory_format=torch.channels_last)` at the end of the module's `__init__`."
    if not clear:
        action = _left(tried, "channels_last")
    yield Finding("warning" if clear else "note", "channels-last", text, action, _saved(tried))


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
