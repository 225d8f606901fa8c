"""Find the parameters of a sharded module that are not finite on any rank."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from lightning_amp._compat import _modules, _sharding
from lightning_amp.numerics import count_nonfinite
from lightning_amp.shadow import gather, is_sharded


def bad_shards(trainer: Trainer, module: LightningModule) -> dict[str, tuple[int, str]] | None:
    """Return the parameters that are not finite on any rank, each with that rank and its shard; all ranks must call.

    `None` for a module that is not sharded, whose ranks can look for themselves.
    """
    if not is_sharded(trainer):
        return None
    parameters = {n: p for n, p in _modules.plain_parameters(module).items() if p.is_floating_point()}
    bad = {n: (trainer.global_rank, _sharding.shard_of(p)) for n, p in parameters.items() if count_nonfinite(p)}
    return {name: where for rank in reversed(gather(trainer, bad)) for name, where in rank.items()}
