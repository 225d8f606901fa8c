"""Name tensors that hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_amp._compat import _modules
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp._containers import tensors_in
from lightning_amp.numerics import names_of_nonfinite
from lightning_amp.shadow import gather, is_sharded, shard_of, shards_of_gathered


def bad_shards(trainer: Trainer, module: LightningModule) -> dict[str, tuple[int, str]] | None:
    """Return the parameters that are not finite on any rank, each with that rank and its shard; all ranks must call.

    `None` for a module that is not sharded, whose ranks can look for themselves.
    """
    if not is_sharded(trainer):
        return None
    shards = shards_of_gathered(module)
    parts: dict[str, Any] = {name: shards.get(id(one), one) for name, one in _modules.plain_parameters(module).items()}
    mine = {name: (trainer.global_rank, shard_of(parts[name])) for name in names_of_nonfinite(parts.items())}
    return {name: where for rank in reversed(gather(trainer, mine)) for name, where in rank.items()}


def nonfinite_names(trainer: Trainer, module: LightningModule, batches: Iterable[Any]) -> list[str]:
    """Name parameters, buffers and parts of batches that are not finite on a rank. All ranks must call this."""
    shards = bad_shards(trainer, module)
    named = [*module.named_buffers(), *(module.named_parameters() if shards is None else ())]
    named += [(f"batch{path}", tensor) for batch in batches for path, tensor in tensors_in(batch)]
    return sorted({*(shards or ())}.union(*gather(trainer, names_of_nonfinite(named))))
