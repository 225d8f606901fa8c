"""Combine the results of all ranks of a sharded module: where a fault began, and which remedies all ranks try."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from typing_extensions import final

from lightning_amp.causes.overflow._remedies import Case, try_remedies
from lightning_amp.findings import Remedy
from lightning_amp.reports import OverflowReport
from lightning_amp.shadow import Lockstep, gather, is_sharded, tensor_parallel_size


@final
class Explained(NamedTuple):
    """The result of one rank's search."""

    report: OverflowReport
    key: str  # the same for all batches that show this cause
    # place of the first fault in the order of the step's operations, to see which rank of several has the origin
    begins: float = math.inf
    is_received: bool = False  # the first values that were not finite came from another rank


def try_together(
    trainer: Trainer, ranks: Lockstep, rerun: Callable[..., bool], found: Explained | None, case: Case | None
) -> list[Remedy]:
    """Try the remedies of each cause on all ranks of a sharded module. Return the remedies for the cause on this rank.

    A rank that has another fault runs too, but its result does not count.
    """
    mine = None if case is None or found is None else found
    work = rerun if case is None else case.is_finite
    everybodys = gather(trainer, mine)
    tried: dict[str, list[Remedy]] = {}
    for one in origins(trainer, [one for one in everybodys if one is not None]):
        if one.key in tried:
            continue
        leader = next(rank for rank, other in enumerate(everybodys) if other is not None and other.key == one.key)

        has_another = mine is not None and mine.key != one.key

        def here(has_another: bool = has_another, **how: Any) -> bool:
            return work(**how) or has_another

        def run(leader: int = leader, here: Callable[..., bool] = here) -> list[Remedy]:
            with ranks.led_by(leader, here) as is_finite:
                if is_finite is None or case is None:
                    return []
                return try_remedies(ranks, replace(case, is_finite=is_finite))

        tried[one.key] = gather(trainer, ranks.run(run))[leader]
    return [] if mine is None else tried.get(mine.key, [])


def origins(trainer: Trainer, found: Sequence[Explained]) -> list[Explained]:
    """Leave out reports that describe the consequence of a fault on another rank.

    A step may exchange values with the other ranks by itself, for example in a contrastive loss. Ranks that differ only
    in tensor parallelism compute with the same batch and exchange activations: the fault began where the first
    operation failed.
    """
    found = [one for one in found if not one.is_received] or found
    if not is_sharded(trainer):
        return list(found)
    size = tensor_parallel_size(trainer)
    kept: dict[tuple[int, str], Explained] = {}
    for group in dict.fromkeys(one.report.rank // size for one in found):
        inside = [one for one in found if one.report.rank // size == group]
        first = min(one.begins for one in inside)
        causes = [one for one in inside if one.begins == first]
        for one in causes[:1] if len(causes) == size else causes:
            shard = one.report.shard
            if size > len(causes) and not shard:
                shard = f"shard {one.report.rank % size} of {size} in mesh dimension `tensor_parallel`"
            kept.setdefault((one.report.rank, one.key), one._replace(report=replace(one.report, shard=shard)))
    return list(kept.values())
