"""Findings about time and memory that another setting saves, and about steps that do not train."""

from __future__ import annotations

import math
import os

from lightning_amp._text import counted, memory, percent, rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import CHANNELS_LAST, DATA, FUSED, OPTIMIZER, Label, Step
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


def overflow(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find steps that are not finite after the loss scale had time to settle."""
    if not step.num_bad:
        return None
    what = "the loss or gradients are" if step.parts else "the loss is" if step.bad_loss else "gradients are"
    some = f"{step.num_bad} of {counted(step.num_seen, 'step')} in {step.precision}"
    text = f"{some} do not train: {what} infinite or NaN.{'' if step.parts else ' So no step was timed.'}"
    action = "Add `OverflowLocator()` to the callbacks of a run: it names the module, the line, and what helps."
    return Finding("error", "overflow", text, action, 1.0)


# -- time --------------------------------------------------------------------------------------------------------------


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
    less = "Do less per item: decode once and save the result, or fetch whole batches with `__getitems__`."
    compute_s = max(step.seconds - wait_s, 1e-9)
    load_s = loading.workers * step.seconds if loading.workers else wait_s
    workers = min(os.cpu_count() or 1, max(2, math.ceil(round(load_s / compute_s, 3))))
    gain = step.seconds / max(compute_s, load_s / workers)
    if workers <= loading.workers or gain < WORTH:
        starts = "Pass `persistent_workers=True` to the DataLoader: its workers start anew in each epoch (not tried). "
        return less if loading.persistent or not loading.workers else f"{starts}{less}"
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
    text += ". A value on a CPU is free to read; on a GPU each read waits for all that was queued." if on_cpu else "."
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
    text += f"; `{label}` was not timed." if found is None else f"; with `{label}`, tried here: {found}."
    if found is not None and is_worth_it(found):
        return Finding("warning", code, text, action, 1 - 1 / found.ratio)
    if found is None or found.claim in ("undecided", "one run"):
        return Finding("note", code, text, f"Time `{label}` by itself, on a quiet machine.")
    return Finding("note", code, text, f"Leave it as it is: `{label}` gains less than 5 % here.")


# -- memory ------------------------------------------------------------------------------------------------------------

_LARGE_BYTES = 16 * 2**20
_FULL, _MATTERS = 0.7, 0.1
"""Shares of a device's memory: a peak above the first is a warning, and a peak below the second is not reported."""
_FREE = "A larger batch uses the memory that is free (`find_batch_size` says how many rows fit)."
_IN_8_BITS = " States in 8 bits (`torchao.optim.AdamW8bit`), or sharding over devices (FSDP2), hold less (not tried)."
_MATTERS_BYTES = 2**30
"""The second bound, for devices whose amount of memory is unknown."""


def large_logits(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find logits over 256 classes or more that hold a tenth of the peak."""
    held, share = step.memory.logits, step.memory.logits / max(step.memory.peak, 1)
    loss = max(step.recorded.losses, key=lambda loss: loss.rows * loss.classes, default=None)
    if loss is None or share < 0.1 or loss.classes < 256:
        return None
    text = (
        f"The logits, {loss.rows:,} x {loss.classes:,}, hold {memory(held)} at the peak, {percent(share)} of it."
        " Autocast computes the loss in fp32, so the logits and their gradients exist in both formats."
    )
    action = (
        "Compute the loss in chunks of rows, each under activation checkpointing: `sum(checkpoint(chunk_loss, h, t,"
        " use_reentrant=False) for h, t in zip(hidden.chunk(8), targets.chunk(8))) / len(targets)`, where `chunk_loss`"
        ' is `F.cross_entropy(head(h), t, reduction="sum")`. Only an eighth of the logits exists at a time then.'
    )
    scarce = share >= 0.25 and held >= 0.02 * machine.memory_gib * 2**30 > 0
    large = scarce or (share >= 0.5 and held >= _LARGE_BYTES)
    return Finding("warning" if large else "note", "large-logits", text, action, share)


def state_dominates(step: Step, machine: Machine, decision: Decision) -> Finding | None:
    """Find weights, gradients and optimizer states that hold half of the peak, unless the peak is small."""
    found, limit = step.memory, machine.memory_gib * 2**30
    state = found.weights + found.gradients + found.states
    share = state / max(found.peak, 1)
    if share < 0.5 or not step.num_parameters or found.peak < (_MATTERS * limit if limit else _MATTERS_BYTES):
        return None
    gradients = max(found.gradients, 4 * sum(optimizer.num_parameters for optimizer in step.optimizers))
    per = (found.weights + gradients + found.states) / step.num_parameters
    text = (
        f"Weights, gradients and the optimizer hold {memory(state)}, {percent(share)} of the peak; that is"
        f" {rounded(per)} bytes per parameter between two steps, and mixed precision does not reduce it"
    )
    if step.fp32_memory is not None:
        text += f": the peak is {memory(found.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    severity: Severity = "warning" if limit and found.peak > _FULL * limit else "note"
    return Finding(severity, "state-dominates", f"{text}.", f"{_FREE}{_IN_8_BITS if found.states else ''}", share)
