"""Replay the records of a run under another scale policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from typing_extensions import final

from lightning_amp._arguments import is_number
from lightning_amp._compat import _torch
from lightning_amp._text import exact
from lightning_amp.findings import StepReason, StepRecord
from lightning_amp.scaling._records import Skip, StepResult
from lightning_amp.scaling._scaler import POLICY_SETTINGS, DynamicLossScaler, move_scale

_BAD_LOSS = torch.tensor(math.nan)


@final
class ReplayedRun(NamedTuple):
    """A run under another policy.

    Attributes:
        records: Records of every step that was skipped or moved the scale, of the first and the last step, and of some
            other steps. The steps between two records were applied at the later one's scale.
        num_decided: How many steps the record decides; the other steps were assumed to overflow, or not to.
        stopped_at: Index of the step that would have ended the run, after `max_consecutive_skips`; `None` if none.

    """

    records: list[StepRecord]
    num_decided: int
    stopped_at: int | None


def scaler_of_policy(policy: Mapping[str, Any], first_scale: float) -> DynamicLossScaler:
    """Return a scaler with these settings, which starts at `first_scale`, clamped to the limits.

    Raise an error for unknown names and wrong values.
    """
    unknown = [name for name in policy if name not in POLICY_SETTINGS]
    if unknown:
        legal = ", ".join(POLICY_SETTINGS)
        raise ValueError(f"A policy has the settings {legal} (see `DynamicLossScaler`); got {unknown[0]!r}.")
    default = DynamicLossScaler()
    least, most = policy.get("min_scale", default.min_scale), policy.get("max_scale", default.max_scale)
    if is_number(least) and is_number(most):  # the scaler refuses wrong values with an error
        first_scale = min(max(first_scale, least), most)
    return DynamicLossScaler(**{"init_scale": first_scale, **policy})


def replay_policy(records: Sequence[StepRecord], scaler: DynamicLossScaler, *, assume_overflow: bool) -> ReplayedRun:
    """Run the scaler's own rule over the overflows of a run.

    If the gradients of a step overflowed at one scale, they would have overflowed at every larger scale. If they did
    not overflow, they would not have overflowed at any smaller scale either. A step with a non-finite loss is skipped
    at every scale. These rules decide most steps. The other steps need an assumption. Replay once with
    `assume_overflow` and once without: the truth may lie between the two runs.

    Args:
        records: As :class:`~lightning_amp.reports.ScaleHistory` stores them: the steps between two records were applied
            at the later one's scale.
        scaler: A scaler with the policy, at its first scale. The replay changes the scaler, so it cannot be used again.
        assume_overflow: Whether a step that the record does not decide overflows.

    Raises:
        ValueError: If several optimizers did not step once each in every batch. The scale moves once per batch, and
            such records do not show where a batch ends.

    Cost: some 50 microseconds for each batch that overflows or in which the scale grows. All other batches cost
    nothing.

    """
    replayed = _Replay(scaler, assume_overflow)
    for batch in _batches(records):
        replayed.run(batch)
        if replayed.stopped_at is not None:
            break
    return ReplayedRun(replayed.records, replayed.num_decided, replayed.stopped_at)


# -- batches -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Batch:
    """The records of a batch, one for each optimizer, and the number of equal batches in a row."""

    steps: tuple[StepRecord, ...]
    count: int = 1

    def shifted(self, batches: int) -> _Batch:
        """Return the batches that are left after the first ones."""
        by = batches * len(self.steps)
        return _Batch(tuple(replace(step, index=step.index + by) for step in self.steps), self.count - batches)

    @property
    def overflowed(self) -> list[bool]:
        """Return, for each step, whether its gradients overflowed at the recorded scale.

        If the scale fell although no step was skipped, a step overflowed and the user repaired its gradients.
        """
        skipped = [step.skipped and step.reason == "gradient" for step in self.steps]
        mended = not any(skipped) and any(step.next_scale < step.scale for step in self.steps)
        return [True] * len(skipped) if mended else skipped


def _batches(records: Sequence[StepRecord]) -> Iterator[_Batch]:
    """Group records into batches, and add the batches in between.

    They have no records because nothing happened in them.
    """
    if not records:
        return
    size = 1 + max(record.optimizer_idx for record in records)
    first, last = records[0].index, records[-1].index
    order = _order(records, size)
    done = 0
    for number, group in groupby(records, key=lambda record: (record.index - first) // size):
        known = {record.index: record for record in group}
        some = next(iter(known.values()))
        start = first + number * size
        # a step without a record was applied at the scale of its batch
        quiet = replace(some, next_scale=some.scale, skipped=False, reason="none")
        steps = [
            known.get(start + i, replace(quiet, index=start + i, optimizer_idx=order[i]))
            for i in range(size)
            if start + i <= last
        ]
        # all steps of a batch that moved the scale are stored
        if len({(step.scale, step.next_scale) for step in steps}) > 1:
            raise _irregular(some, size)
        if number > done:
            clean = [replace(quiet, index=first + done * size + i, optimizer_idx=order[i]) for i in range(size)]
            yield _Batch(tuple(clean), number - done)
        yield _Batch(tuple(steps))
        done = number + 1


def _order(records: Sequence[StepRecord], size: int) -> list[int]:
    """Return the order of the optimizers in every batch, as far as the records show it."""
    order: dict[int, int] = {}
    for record in records:
        if order.setdefault((record.index - records[0].index) % size, record.optimizer_idx) != record.optimizer_idx:
            raise _irregular(record, size)
    if len(set(order.values())) < len(order):
        raise _irregular(records[-1], size)
    others = iter(sorted(set(range(size)) - set(order.values())))
    return [order[i] if i in order else next(others) for i in range(size)]


def _irregular(record: StepRecord, size: int) -> ValueError:
    return ValueError(
        f"The record of {size} optimizers cannot be replayed. A policy moves the scale once per batch. At step"
        f" {record.index} (optimizer {record.optimizer_idx}, scale {exact(record.scale)} -> {exact(record.next_scale)})"
        " the records do not show batches in which each optimizer steps once, in the same order."
    )


# -- the rule ----------------------------------------------------------------------------------------------------------


@final
class _Replay:
    """A replay in progress: the scaler, the records so far, and how many steps the record decides."""

    def __init__(self, scaler: DynamicLossScaler, assume_overflow: bool) -> None:
        self.records: list[StepRecord] = []
        self.num_decided = 0
        self.stopped_at: int | None = None
        self._scaler = scaler
        self._in_force = scaler.scale_tensor.item()
        self._assume_overflow = assume_overflow
        self._streak = 0

    def run(self, batch: _Batch) -> None:
        """Replay a batch, or all equal batches in a row, up to the batch that stops the run."""
        while batch.count > 0 and self.stopped_at is None:
            quiet = self._num_quiet(batch)
            if quiet > 0:
                self._count_clean(batch, quiet)
            else:
                self._take(batch)
            batch = batch.shifted(quiet or 1)

    def _num_quiet(self, batch: _Batch) -> int:
        """Return how many of these batches only increase the count of clean steps, before the scale grows."""
        if batch.count == 1 or (self._assume_overflow and not self._is_known(batch.steps[0], overflowed=False)):
            return 0
        until_growth = self._scaler.get_growth_interval() - self._clean_steps - 1
        return min(batch.count, until_growth)

    @property
    def _clean_steps(self) -> int:
        return int(_torch.growth_tracker(self._scaler))

    def _count_clean(self, batch: _Batch, count: int) -> None:
        tracker = torch.full_like(_torch.growth_tracker(self._scaler), self._clean_steps + count)
        _torch.set_scale_tensor(self._scaler, self._scaler.scale_tensor, tracker)
        if self._is_known(batch.steps[0], overflowed=False):
            self.num_decided += count * len(batch.steps)
        self._streak = 0

    def _is_known(self, step: StepRecord, overflowed: bool) -> bool:
        """Return whether the recorded step shows if it would overflow at the current scale.

        A step at scale 0 does not show it.
        """
        if step.skipped and step.reason == "loss":
            return True
        return step.scale > 0 and (self._in_force >= step.scale if overflowed else self._in_force <= step.scale)

    def _take(self, batch: _Batch) -> None:
        results: list[StepResult] = []
        taken: list[StepRecord] = []
        for step, overflowed in zip(batch.steps, batch.overflowed, strict=True):
            bad_loss = step.skipped and step.reason == "loss"
            known = self._is_known(step, overflowed)
            overflows = overflowed if known else self._assume_overflow
            mended = overflowed and not step.skipped
            skip = Skip.YES if bad_loss or overflows else Skip.NO
            results.append(StepResult(skip, _BAD_LOSS if bad_loss else None, step.optimizer_idx, overflow=skip))
            skipped = bad_loss or (overflows and not mended)
            reason: StepReason = "loss" if bad_loss else "gradient" if skipped else "none"
            taken.append(replace(step, scale=self._in_force, skipped=skipped, reason=reason))
            self.num_decided += known
        move_scale(self._scaler, results)
        self._in_force = self._scaler.scale_tensor.item()
        for step in taken:
            self.records.append(replace(step, next_scale=self._in_force))
            self._streak = self._streak + 1 if step.skipped else 0
            if self._streak == self._scaler.max_consecutive_skips:
                self.stopped_at = step.index
