"""Derive from a recorded step which tensors fill its memory at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import nn

from lightning_amp._containers import tensors_in
from lightning_amp.advice._record import Allocation, Memory, Recording
from lightning_amp.measure import OPTIMIZER, has_storage, num_bytes


def memory(recorded: Recording, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Memory:
    """Return the bytes that tensors held at the peak of the recorded step."""
    grads = [p.grad for p in module.parameters() if p.grad is not None and has_storage(p.grad)]
    kept = {gradient.untyped_storage().data_ptr() for gradient in grads}
    loss_sizes = {loss.numel for loss in recorded.losses if loss.classes > 1}

    def kind(made: Allocation) -> str:
        if made.begin == -1 or (made.pointer in kept and made.end is None):
            return "gradients"
        if made.part == OPTIMIZER:
            return "temporaries"
        if made.numel in loss_sizes:
            return "logits"
        return "casts" if made.is_cast else "activations"

    parts, top = _peak(recorded.allocations, kind)
    of_batch = [made for made in recorded.allocations if kind(made) not in ("gradients", "temporaries")]
    weights = num_bytes(chain(module.parameters(), module.buffers()))
    states = sum(num_bytes(t for _, t in tensors_in(list(optimizer.state.values()))) for optimizer in optimizers)
    return Memory(
        weights=weights,
        gradients=parts["gradients"],
        states=states,
        activations=parts["activations"],
        logits=parts["logits"],
        casts=parts["casts"],
        temporaries=parts["temporaries"],
        peak=weights + states + top,
        of_batch=_peak(of_batch, kind)[1],
    )


def _peak(allocations: Sequence[Allocation], kind: Callable[[Allocation], str]) -> tuple[Counter[str], int]:
    """Return the bytes at the peak, by kind and in total."""
    changes = Counter[int]()
    for made in allocations:
        changes[made.begin] += made.num_bytes
        if made.end is not None:
            changes[made.end] -= made.num_bytes
    held = top = 0
    peak_at = -1
    for moment in sorted(changes):
        held += changes[moment]
        if held > top:
            top, peak_at = held, moment
    parts = Counter[str]()
    for made in allocations:
        if made.begin <= peak_at and (made.end is None or made.end > peak_at):
            parts[kind(made)] += made.num_bytes
    return parts, top
