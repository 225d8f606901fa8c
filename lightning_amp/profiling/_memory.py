"""Where the memory of a recorded step is, and what its optimizers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_amp._compat import _torch
from lightning_amp._containers import tensors_in
from lightning_amp.advice import Memory, OptimizerFacts
from lightning_amp.measure import OPTIMIZER, has_storage, num_bytes
from lightning_amp.profiling._operations import Allocation
from lightning_amp.profiling._recorder import Recorder
from lightning_amp.profiling._variants import can_fuse


def memory(recorder: Recorder, trainer: Trainer, module: LightningModule) -> Memory:
    """Return what tensors held at the peak of the recorded step."""
    grads = [p.grad for p in module.parameters() if p.grad is not None and has_storage(p.grad)]
    kept = {gradient.untyped_storage().data_ptr() for gradient in grads}
    loss_sizes = {loss.rows * loss.classes for loss in recorder.losses if loss.classes > 1}

    def kind(made: Allocation) -> str:
        if made.begin == -1 or (made.pointer in kept and made.end is None):
            return "gradients"
        if made.part == OPTIMIZER:
            return "temporaries"
        if made.numel in loss_sizes:
            return "logits"
        return "casts" if made.is_cast else "activations"

    last = len(recorder.operations) + 1
    parts, top = _peak(recorder.allocations, kind, last)
    of_batch = [made for made in recorder.allocations if kind(made) not in ("gradients", "temporaries")]
    weights = num_bytes(chain(module.parameters(), module.buffers()))
    states = sum(num_bytes(_state_tensors(optimizer)) for optimizer in trainer.optimizers)
    return Memory(
        weights=weights,
        gradients=parts["gradients"],
        states=states,
        activations=parts["activations"],
        logits=parts["logits"],
        casts=parts["casts"],
        temporaries=parts["temporaries"],
        peak=weights + states + top,
        of_batch=_peak(of_batch, kind, last)[1],
    )


def _peak(allocations: Iterable[Allocation], kind: Callable[[Allocation], str], last: int) -> tuple[Counter[str], int]:
    """Return the bytes by kind where they are most, and all together.

    Args:
        allocations: Which.
        kind: Of each.
        last: A moment after all operations.

    """
    own = list(allocations)
    changes = Counter[int]()
    for made in own:
        changes[made.begin] += made.num_bytes
        changes[last if made.end is None else made.end] -= made.num_bytes
    held = top = 0
    peak_at = -1
    for moment in sorted(changes):
        held += changes[moment]
        if held > top and moment != last:
            top, peak_at = held, moment
    parts = Counter[str]()
    for made in own:
        if made.begin <= peak_at and (made.end is None or made.end > peak_at):
            parts[kind(made)] += made.num_bytes
    return parts, top


def largest_loss(recorder: Recorder) -> tuple[int, int] | None:
    """Return rows and classes of the largest loss over classes; `None` without any."""
    found = max(recorder.losses, key=lambda loss: loss.rows * loss.classes, default=None)
    return None if found is None else (found.rows, found.classes)


def optimizer_facts(trainer: Trainer) -> tuple[OptimizerFacts, ...]:
    """Return what there is to say about each optimizer."""
    found: list[OptimizerFacts] = []
    for optimizer in trainer.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        number = sum(p.numel() for p in parameters)
        has_flag = all("fused" in group for group in optimizer.param_groups)
        found.append(
            OptimizerFacts(
                type(optimizer).__name__,
                has_flag and _torch.is_fused(optimizer),
                can_fuse(optimizer),
                num_bytes(_state_tensors(optimizer)) / max(1, number),
                number,
            )
        )
    return tuple(found)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (tensor for _, tensor in tensors_in(list(optimizer.state.values())))
