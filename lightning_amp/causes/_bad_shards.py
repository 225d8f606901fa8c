"""Find the parameters of a sharded module that are not finite on any rank."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from lightning_amp._compat import _modules
from lightning_amp.numerics import count_nonfinite
from lightning_amp.shadow import gather, is_sharded, shard_of, shards_of_gathered


def bad_shards(trainer: Trainer, module: LightningModule) -> dict[str, tuple[int, str]] | None:
    """Return the parameters that are not finite on any rank, each with that rank and its shard; all ranks must call.

    `None` for a module that is not sharded, whose ranks can look for themselves.
    """
    if not is_sharded(trainer):
        return None
    parameters = {n: p for n, p in _modules.plain_parameters(module).items() if p.is_floating_point()}
    shards = shards_of_gathered(module)
    mine: tuple[dict[str, tuple[int, str]], ...] = ({}, {})  # of gathered parameters, which code may edit; of shards
    for name, parameter in parameters.items():
        shard = shards.get(id(parameter))
        for bad, values in zip(mine, (parameter, parameter if shard is None else shard), strict=True):
            if count_nonfinite(values):
                bad[name] = trainer.global_rank, shard_of(values)
    everybodys = list(reversed(gather(trainer, mine)))
    return {name: where for kind in (0, 1) for rank in everybodys for name, where in rank[kind].items()}
