"""`state-dominates`: weights, gradients and the optimizer hold most of the memory."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import memory, percent, rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Memory, Step
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule

_FULL, _MATTERS = 0.7, 0.1
"""Shares of the memory of a device: a peak above the first is a warning; below the second less of it is no use."""
_MATTERS_BYTES = 2**30
"""The same where the memory of the device is not known."""
_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb")


def peak_matters(step: Step, machine: Machine) -> bool:
    """Return whether the peak is so large a part of the device that less of it would change a decision."""
    limit = machine.memory_gib * 2**30
    return step.memory.peak >= (_MATTERS * limit if limit else _MATTERS_BYTES)


def state_bytes(found: Memory) -> int:
    """Return what weights, gradients and optimizers hold, in the step of the optimizer too."""
    return found.weights + found.gradients + found.states + found.temporaries


def _find(seen: Seen) -> Iterator[Finding]:
    step, machine, found = seen.step, seen.machine, seen.step.memory
    state = state_bytes(found)
    share = state / max(found.peak, 1)
    if share < 0.5 or not step.num_parameters or not peak_matters(step, machine):
        return
    per = (found.weights + _gradients(step) + found.states) / step.num_parameters
    beside = f" ({memory(found.temporaries)} of it in its step alone)" if found.temporaries else ""
    text = (
        f"Weights, gradients and the optimizer{beside} hold {memory(state)}, {percent(share)} of the peak; that is"
        f" {rounded(per)} bytes per parameter between two steps, and mixed precision leaves it as it is"
    )
    if step.fp32_memory is not None:
        text += f": the peak is {memory(found.peak)}, and {memory(step.fp32_memory.peak)} in fp32"
    limit = machine.memory_gib * 2**30
    full = limit > 0 and found.peak > _FULL * limit
    action = " ".join(_savings(step, machine))
    yield Finding("warning" if full else "note", "state-dominates", f"{text}.", action, share)


def _gradients(step: Step) -> int:
    """Return the bytes of gradients when all of them are there, which the peak need not be."""
    return max(step.memory.gradients, 4 * sum(optimizer.num_parameters for optimizer in step.optimizers))


def _savings(step: Step, machine: Machine) -> Iterator[str]:
    found = step.memory
    if step.batch_size:
        per_row = found.of_batch / step.batch_size
        yield (
            f"A larger batch uses what is free: a row of it takes {memory(int(per_row))}"
            " (`find_batch_size` says how many fit)."
        )
    if found.temporaries > 0.1 * found.peak and any(optimizer.can_fuse for optimizer in step.optimizers):
        yield f"`fused=True` saves {memory(found.temporaries)} in the step of the optimizer."
    states = found.states
    adam = [optimizer for optimizer in step.optimizers if optimizer.name.startswith(_ADAM)]
    if adam and states:
        number = sum(optimizer.num_parameters for optimizer in adam)
        if states > 6 * number:  # they are in fp32
            yield (
                f"States in 8 bits (`torchao.optim.AdamW8bit`) save {memory(max(0, states - 2 * number))}, in bf16"
                f" {memory(states // 2)}."
            )
    if machine.device_type == "cuda":
        sharded = (found.weights + _gradients(step) + states) * 7 // 8
        yield f"Sharding over 8 devices (FSDP2) saves {memory(sharded)} on each."
    if found.activations > 0.1 * found.peak:
        yield f"Activation checkpointing can save part of {memory(found.activations)} of activations."


STATE_DOMINATES = StepRule(_find)
