"""Values that the ranks of a run tell each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

T = TypeVar("T")


def gather(trainer: Trainer, value: T) -> list[T]:
    """Return `value` of every rank, in order; all must call. It is pickled: for small things and rare events."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def gather_on_zero(trainer: Trainer, value: T) -> list[T]:
    """Return the same on rank 0, an empty list elsewhere."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * trainer.world_size if trainer.global_rank == 0 else None
    torch.distributed.gather_object(value, values)
    return values or []
