"""Where the memory of a recorded step is, and what its optimizers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_amp._compat import _torch
from lightning_amp.advice import Memory, OptimizerFacts
from lightning_amp.profiling._clock import OPTIMIZER
from lightning_amp.profiling._operations import Allocation
from lightning_amp.profiling._recorder import Recorder
from lightning_amp.profiling._variants import can_fuse


def memory(recorder: Recorder, trainer: Trainer, module: LightningModule) -> Memory:
    """Return what tensors held at the peak of the recorded step."""
    grads = [p.grad for p in module.parameters() if p.grad is not None and _is_plain(p.grad)]
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
    weights = _bytes(chain(module.parameters(), module.buffers()))
    states = sum(_bytes(_state_tensors(optimizer)) for optimizer in trainer.optimizers)
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
                _bytes(_state_tensors(optimizer)) / max(1, number),
                number,
            )
        )
    return tuple(found)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (value for state in optimizer.state.values() for value in _tensors_in(state))


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages: dict[int, int] = {}
    for tensor in (inner for outer in tensors for inner in _inner(outer)):
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _inner(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors that hold the values: of one that is quantized there are several."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return (tensor,)
    flat: Any = tensor
    return [inner for name in flat.__tensor_flatten__()[0] for inner in _inner(getattr(flat, name))]


def _is_plain(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta
