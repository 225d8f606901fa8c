"""`data-bound`, `host-waits`, `optimizer-not-fused`, `channels-last`: time that another setting saves."""

from __future__ import annotations

import math
import os

from lightning_amp._text import counted, percent
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._part_timer import DATA, OPTIMIZER
from lightning_amp.advice._step import (
    CHANNELS_LAST,
    FUSED,
    Label,
    Step,
)
from lightning_amp.advice.findings._finding import (
    WORTH,
    Decision,
    Finding,
    Severity,
    duration,
    graded,
    is_worth_it,
)
from lightning_amp.measure import times_as_fast


def data_bound(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find a wait for batches of a tenth of a step; from a quarter of a step on, it is a warning."""
    share, wait_s = step.share(DATA), step.parts.get(DATA, 0.0)
    if share < 0.1 or wait_s < 2e-4:
        return None
    text = f"A step waits {duration(wait_s)} for its batch, {percent(share)} of its time; no precision helps there."
    return Finding(graded(share, 0.25), "data-bound", text, _faster_loading(step, wait_s), share)


def _faster_loading(step: Step, wait_s: float) -> str:
    """Advise workers, from what loading takes: workers load while a step computes, so a step only waits for the rest.

    With n workers, one batch takes one worker n steps. Without workers it takes the wait.
    """
    loading = step.loading
    if loading is None:
        return "Make the loader faster: decode and collate in worker processes, or ahead of time."
    if loading.workers and not loading.persistent and loading.restart_s > 0.5 * wait_s:
        return (
            f"Pass `persistent_workers=True` to the DataLoader: starting {counted(loading.workers, 'worker')} at each"
            f" epoch takes {duration(loading.restart_s)} of a step."
        )
    less = "Do less per item: decode once and save the result, or fetch whole batches with `__getitems__`."
    compute_s = max(step.seconds - wait_s, 1e-9)
    load_s = loading.workers * step.seconds if loading.workers else wait_s
    workers = min(os.cpu_count() or 1, max(2, math.ceil(load_s / compute_s)))
    gain = step.seconds / max(compute_s, load_s / workers)
    if workers <= loading.workers or gain < WORTH:
        return less
    own = " if the `IterableDataset` gives each worker its own rows (`get_worker_info`)" if loading.is_stream else ""
    return (
        f"Pass `num_workers={workers}, persistent_workers=True` to the DataLoader{own}: workers load while the step"
        f" computes, which can make it {times_as_fast(gain)} at most (not tried). {less}"
    )


def host_waits(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find lines of the user's code that read values from the device. On a CPU this is a note at most."""
    own = step.recorded.waits
    count = sum(wait.count for wait in own)
    if not count:
        return None
    on_cpu = machine.device_type == "cpu"
    text = f"The host reads a value from the device {counted(count, 'time')} in a step: {own[0].operation} in"
    text += f" {own[0].where}" + (f", and in {counted(len(own) - 1, 'other place')}" if len(own) > 1 else "")
    text += ". On a CPU that is free; on a GPU each read waits for everything that was queued." if on_cpu else "."
    action = "Keep it on the device (`.detach()` instead of `.item()`), and log with `self.log`, which rarely waits."
    severity: Severity = "note" if on_cpu or count < 2 else "warning"
    return Finding(severity, "host-waits", text, action, 0.0 if on_cpu else min(0.3, 0.02 * count))


def optimizer_not_fused(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find an optimizer that takes 5 % of a step, or that was faster with `fused=True`."""
    share = step.share(OPTIMIZER)
    name = next((optimizer.name for optimizer in step.optimizers if optimizer.can_fuse), None)
    if name is None or (share < 0.05 and not is_worth_it(step.gain(FUSED))):
        return None
    text = f"`{name}` takes {percent(share)} of a step, in several kernels"
    return _tried(
        step, FUSED, "optimizer-not-fused", text, f"Pass `fused=True`: `torch.optim.{name}(..., fused=True)`."
    )


def channels_last(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find convolutions of images with the channels first, if they are a tenth of the FLOPs."""
    share = min(1.0, step.recorded.convolution_flops / max(step.recorded.forward_flops, 1))
    if share < 0.1 or step.recorded.channels_last:
        return None
    text = f"{percent(share)} of the FLOPs of the forward are convolutions whose images have the channels first"
    action = "Write `self.to(memory_format=torch.channels_last)` at the end of the module's `__init__`."
    return _tried(step, CHANNELS_LAST, "channels-last", text, action)


def _tried(step: Step, label: Label, code: str, text: str, action: str) -> Finding:
    """Return a warning with the action if the change gained enough here, else a note with its gain."""
    found = step.gain(label)
    if found is not None and is_worth_it(found):
        return Finding("warning", code, f"{text}; with `{label}`, tried here: {found}.", action, 1 - 1 / found.ratio)
    if found is None or found.claim in ("undecided", "one run"):
        text += f"; with `{label}`, tried here: {found}." if found is not None else f"; `{label}` was not timed."
        return Finding("note", code, text, f"The race is undecided. Time `{label}` by itself, on a quiet machine.")
    text += f"; with `{label}`, tried here: {found}."
    return Finding("note", code, text, f"Leave it as it is: `{label}` gains less than 5 % here.")
