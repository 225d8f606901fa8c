"""Count the bytes of a training step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from benchmarks.claims._models import Example
from benchmarks.claims._speed import step
from lightning_amp.measure import PeakMemory, num_bytes


@final
class Saved(NamedTuple):
    """Bytes that the forward keeps for the backward: activations, and half-precision copies of weights."""

    activations: int
    copies: int


def saved(example: Example, dtype: torch.dtype | None) -> Saved:
    """Return the bytes that a forward under autocast keeps, without the parameters themselves."""
    kept: list[Tensor] = []
    parameters = list(example.net.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
        return tensor

    def same(tensor: Tensor) -> Tensor:
        return tensor

    hooks: Any = torch.autograd.graph.saved_tensors_hooks(keep, same)
    device_type = example.batch.device.type
    with hooks, torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = example.loss(example.net, example.batch)  # the graph keeps alive what is counted
    copies = [tensor for tensor in kept if tensor.dtype == dtype and _is_weight(tensor, parameters)]
    total, of_copies = num_bytes(kept), num_bytes(copies)
    del loss
    return Saved(total - of_copies, of_copies)


def _is_weight(tensor: Tensor, parameters: Iterable[Tensor]) -> bool:
    values = tensor.flatten().sort().values
    same = [p for p in parameters if p.numel() == tensor.numel()]
    return any(torch.equal(values, p.detach().to(tensor.dtype).flatten().sort().values) for p in same)


def peak(example: Example, dtype: torch.dtype | None) -> int:
    """Return the most bytes that three steps of training with AdamW hold at once."""
    train = step(example, dtype)
    memory = PeakMemory(example.batch.device, example.net)
    memory.resume()
    for _ in range(3):
        train()
    found = memory.close()
    if found is None:
        raise RuntimeError("The peak memory could not be measured. Next step: stop other profilers.")
    return found
