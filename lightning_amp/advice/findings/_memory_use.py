"""`large-logits`, `state-dominates` and `memory-not-lower`: what holds the memory of a step at its peak."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import memory, percent, rounded
from lightning_amp.advice._decision import FP32
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Loss, Memory, Step
from lightning_amp.advice.findings._finding import Evidence, Finding

_LARGE_BYTES = 16 * 2**20


def largest_loss(step: Step) -> Loss | None:
    """Return the largest loss over classes; `None` if there is none."""
    return max(step.recorded.losses, key=lambda loss: loss.numel, default=None)


def large_logits(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if logits over 256 classes or more hold a tenth of the peak."""
    held, peak = evidence.step.memory.logits, max(evidence.step.memory.peak, 1)
    share, loss = held / peak, largest_loss(evidence.step)
    if loss is None or share < 0.1 or loss.classes < 256:
        return
    text = (
        f"The logits, {loss.rows:,} x {loss.classes:,}, hold {memory(held)} at the peak, {percent(share)} of it."
        " Autocast computes the loss in fp32, so the logits and their gradients exist in both formats."
    )
    action = (
        "Compute the loss in chunks of rows, each under activation checkpointing: `sum(checkpoint(chunk_loss, h, t,"
        " use_reentrant=False) for h, t in zip(hidden.chunk(8), targets.chunk(8))) / len(targets)`, where `chunk_loss`"
        ' is `F.cross_entropy(head(h), t, reduction="sum")`. Only an eighth of the logits exists at a time then.'
    )
    scarce = share >= 0.25 and held >= 0.02 * evidence.machine.memory_gib * 2**30 > 0
    large = scarce or (share >= 0.5 and held >= _LARGE_BYTES)
    yield Finding("warning" if large else "note", "large-logits", text, action, share)


_FULL, _MATTERS = 0.7, 0.1
"""Shares of a device's memory: a peak above the first is a warning, and a peak below the second is not reported."""
_MATTERS_BYTES = 2**30
"""The second bound, for devices whose amount of memory is unknown."""
_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb")


def peak_matters(step: Step, machine: Machine) -> bool:
    """Return whether the peak is a tenth of the device's memory or more: a lower one could change a decision."""
    limit = machine.memory_gib * 2**30
    return step.memory.peak >= (_MATTERS * limit if limit else _MATTERS_BYTES)


def state_bytes(found: Memory) -> int:
    """Return the bytes of weights, gradients and optimizers, temporaries of the optimizer's step included."""
    return found.weights + found.gradients + found.states + found.temporaries


def state_dominates(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding with the ways to save memory; it is a warning if the device is nearly full."""
    step, machine, found = evidence.step, evidence.machine, evidence.step.memory
    state = state_bytes(found)
    share = state / max(found.peak, 1)
    if share < 0.5 or not step.num_parameters or not peak_matters(step, machine):
        return
    per = (found.weights + _gradients(step) + found.states) / step.num_parameters
    beside = f" ({memory(found.temporaries)} of it in its step alone)" if found.temporaries else ""
    text = (
        f"Weights, gradients and the optimizer{beside} hold {memory(state)}, {percent(share)} of the peak; that is"
        f" {rounded(per)} bytes per parameter between two steps, and mixed precision does not reduce it"
    )
    if step.fp32_memory is not None:
        text += f": the peak is {memory(found.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    limit = machine.memory_gib * 2**30
    full = limit > 0 and found.peak > _FULL * limit
    action = " ".join(_savings(step, machine))
    yield Finding("warning" if full else "note", "state-dominates", f"{text}.", action, share)


def _gradients(step: Step) -> int:
    """Return the bytes of all gradients; at the peak some of them may not exist."""
    return max(step.memory.gradients, 4 * sum(optimizer.num_parameters for optimizer in step.optimizers))


def _savings(step: Step, machine: Machine) -> Iterator[str]:
    found = step.memory
    if step.batch_size:
        per_row = found.of_batch / step.batch_size
        yield (
            f"A larger batch uses the memory that is free: each row takes {memory(int(per_row))}"
            " (`find_batch_size` says how many fit)."
        )
    if found.temporaries > 0.1 * found.peak and any(optimizer.can_fuse for optimizer in step.optimizers):
        yield f"`fused=True` saves {memory(found.temporaries)} in the step of the optimizer."
    states = found.states
    adam = [optimizer for optimizer in step.optimizers if optimizer.name.startswith(_ADAM)]
    if adam and states:
        number = sum(optimizer.num_parameters for optimizer in adam)
        if states > 6 * number:  # the states are in fp32
            yield (
                f"States in 8 bits (`torchao.optim.AdamW8bit`) save {memory(max(0, states - 2 * number))}, in bf16"
                f" {memory(states // 2)}."
            )
    if machine.device_type == "cuda":
        sharded = (found.weights + _gradients(step) + states) * 7 // 8
        yield f"Sharding over 8 devices (FSDP2) saves {memory(sharded)} on each."
    if found.activations > 0.1 * found.peak:
        yield f"Activation checkpointing can save part of {memory(found.activations)} of activations."


def memory_not_lower(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding unless the peak is at least 2 % lower than in fp32."""
    found, full = evidence.step.memory, evidence.step.fp32_memory
    if full is None or evidence.step.precision == FP32 or not peak_matters(evidence.step, evidence.machine):
        return
    if found.peak <= 0.98 * full.peak or [*large_logits(evidence), *state_dominates(evidence)]:
        return
    text = (
        f"The peak is {memory(found.peak)}, and {memory(full.peak)} in fp32: weights, gradients and the"
        f" optimizer hold {memory(state_bytes(found))}, casts {memory(found.casts)}, and activations"
        f" {memory(found.activations)}."
    )
    action = "Mixed precision halves only the activations, so it saves more with a larger batch."
    yield Finding("note", "memory-not-lower", text, action, 0.05)
