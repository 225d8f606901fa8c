"""`large-logits`, `state-dominates`: what holds the memory of a step at its peak."""

from __future__ import annotations

from lightning_amp._text import memory, percent, rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import (
    Step,
)
from lightning_amp.advice.findings._finding import (
    Decision,
    Finding,
    Severity,
)

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
