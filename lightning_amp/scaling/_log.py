"""The record of each step: written on the device without a wait, and read back in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._text import exact
from lightning_amp.findings import StepPrecision, StepReason, StepRecord
from lightning_amp.numerics import nonfinite
from lightning_amp.scaling._checkpoint import Saved
from lightning_amp.scaling._scalars import Skip, read_scalars


@final
@dataclass(slots=True, eq=False)
class StepResult:
    """The outcome of one step before the host has read it. :class:`RecordLog` turns it into a :class:`StepRecord`.

    Attributes:
        skip: Whether the step was skipped.
        loss_probe: A value [] that is finite exactly if all losses of this step were; `None` if there was no loss.
        optimizer_idx: Place of the optimizer in `configure_optimizers`.
        scale: Loss scale used, []; `None` without scaling.
        overflow: Whether the scale was too large. If the user repaired the gradients, such a step is still applied.
        known_bad_loss: Whether the loss was not finite, if the host has read that together with `skip`.
        reported_bad_loss: Whether to report a loss that was not finite; `Skip.NO` if no listener asks for such reports.
        next_scale: The loss scale of the next step, []; set when the round has ended.

    """

    skip: Skip
    loss_probe: Tensor | None = None
    optimizer_idx: int = 0
    scale: Tensor | None = None
    overflow: Skip = Skip.NO
    known_bad_loss: Skip | None = None
    reported_bad_loss: Skip = Skip.NO
    next_scale: Tensor | None = None

    @property
    def bad_loss(self) -> Skip:
        """Return whether the loss was not finite. Its forward leaves NaN in buffers even if the step is applied."""
        if self.known_bad_loss is not None or self.loss_probe is None:
            return self.known_bad_loss or Skip.NO
        return Skip.on_device(nonfinite(self.loss_probe))


@final
@dataclass(eq=False)
class Subscription:
    """A listener of a :class:`RecordLog`, until :meth:`close`.

    Args:
        listener: Gets the records, in blocks.
        everybody: All open subscriptions of the log.
        at_once: Deliver all pending records at the end of a batch in which a step was skipped.
        on_bad_loss: Gets the record of each step that was applied although its loss was not finite.
        before_update: Called with the index of a step and its optimizer, right before the update reads hyperparameters.
        cause: Explains, for the error of a stuck run, the skips since a given step index. It returns an empty text if
            it has no explanation; `None` if the listener does not search for causes.

    """

    listener: Callable[[list[StepRecord]], None]
    everybody: list[Subscription]
    at_once: bool = False
    on_bad_loss: Callable[[StepRecord], None] | None = None
    before_update: Callable[[int, Optimizer], None] | None = None
    cause: Callable[[int], str] | None = None

    def close(self) -> None:
        """End the subscription. A second call does nothing."""
        if self in self.everybody:
            self.everybody.remove(self)


@final
class RecordLog:
    """Keeps references to scalars on the device and turns them into `StepRecord`s one block at a time.

    Appending a result launches no kernel and does not wait, because scale tensors are never changed in place. Reading a
    block waits for the device once. It transfers the flags, the scales and, if steps were
    skipped, their losses.

    Args:
        limit: Raise `FloatingPointError` when the records of this many skips in a row are read. A skip that lowered the
            scale starts the count again.
        block: Number of records to collect before they are read back.
        describe_skips: Describes the gradients of a stuck run, for the error.
        has_callbacks: Whether the run has callbacks, of which the error can then recommend one.

    Attributes:
        precision: The precision of the steps to come.
        num_steps: Applied steps that were read back.
        num_skipped: Skipped steps that were read back.
        num_lost: Skipped steps that were read back and did not lower the scale.
        last: The last record that was read back.
        streak: The reason of each of the latest skips in a row, up to `last`.
        num_known_skips: Number of skips that the host decided and that were not read back yet.
        subscriptions: The open ones.

    """

    def __init__(
        self, limit: int = 64, *, block: int = 64, describe_skips: Callable[[], str] = str, has_callbacks: bool = True
    ) -> None:
        self.limit, self.precision = limit, ""
        self.subscriptions: list[Subscription] = []
        self._block = block
        self._describe_skips, self._has_callbacks = describe_skips, has_callbacks
        self._pending: list[StepResult] = []  # complete records that were not read yet
        self._open: list[StepResult] = []  # records whose next scale is not known yet
        self.restore(0, 0, (), None)

    def restore(self, num_steps: int, num_skipped: int, streak: Sequence[StepReason], last: StepRecord | None) -> None:
        """Continue the counters of a checkpoint, or of an earlier fit. Pending records are dropped."""
        self._pending.clear()
        self._open.clear()
        self.num_known_skips = self.num_lost = 0
        self.num_steps, self.num_skipped, self.last = num_steps, num_skipped, last
        self.streak: tuple[StepReason, ...] = tuple(streak)
        self._known_streak = len(streak)  # number of skips in a row, as far as the host has it without reading
        self._num_blocks = self.num_attempted // self._block

    def go_on_in(self, precision: str, limit: int) -> None:
        """Set the precision of the steps to come, and how many skips in a row are too many."""
        self.precision, self.limit = precision, limit

    # -- listening -----------------------------------------------------------------------------------------------------

    def subscribe(
        self, listener: Callable[[list[StepRecord]], None], *, at_once: bool = False, **also: Any
    ) -> Subscription:
        """Have `listener` receive all records to come, in blocks, oldest first. Return a handle, to be closed.

        See :class:`Subscription` for the arguments.

        Cost: nothing; with `at_once` one wait for the device per batch, or none where the host decides.
        """
        self.subscriptions.append(Subscription(listener, self.subscriptions, at_once, **also))
        return self.subscriptions[-1]

    def announce(self, optimizer: Optimizer) -> None:
        """Call `before_update` of the listeners: this optimizer updates next, unless the device skips it."""
        for subscription in self.subscriptions:
            if subscription.before_update is not None:
                subscription.before_update(self.num_attempted, optimizer)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, step: StepResult) -> None:
        """Add the result of an attempted step; :meth:`complete` adds the next scale to it."""
        if any(s.on_bad_loss is not None for s in self.subscriptions):
            step.reported_bad_loss = step.bad_loss
        self._open.append(step)
        if step.skip.known:
            self._known_streak += 1
            self.num_known_skips += 1
        else:
            self._known_streak = 0

    def complete(self, next_scale: Tensor | None) -> None:
        """Give all open records their next scale. Reads nothing back."""
        for step in self._open:
            step.next_scale = next_scale
        self._pending += self._open
        self._open.clear()

    def close_round(self, next_scale: Tensor | None) -> None:
        """Complete the records of this round, and read them back if a block is full.

        Raise `FloatingPointError` if too many steps in a row were skipped.
        """
        self.complete(next_scale)
        # All ranks must read in the same batch. So count all steps and not only unread steps, because some ranks may
        # have read in between.
        num_blocks, before = self.num_attempted // self._block, self._num_blocks
        self._num_blocks = num_blocks
        at_once = any(s.at_once for s in self.subscriptions)
        if self._known_streak >= self.limit or num_blocks > before or (at_once and self._has_news()):
            self.flush()

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def num_attempted(self) -> int:
        """Return how many steps were attempted, read back or not. Reads nothing."""
        return self.num_steps + self.num_skipped + len(self._pending) + len(self._open)

    def _has_news(self) -> bool:
        """Return whether a pending step was skipped, or had a loss that is not finite.

        This waits only for flags that were not read yet.
        """
        unread = [s for s in self._pending if None in (s.skip.known, s.reported_bad_loss.known)]
        for step, (skip, bad_loss) in zip(unread, _read_flags(unread), strict=True):
            step.skip, step.reported_bad_loss = Skip(skip > 0), Skip(bad_loss > 0)
        return any(step.skip.known or step.reported_bad_loss.known for step in self._pending)

    def flush(self) -> None:
        """Read everything back. This waits for the device.

        Raise `FloatingPointError` if too many steps in a row were skipped.
        """
        pending, self._pending = self._pending, []
        self.num_known_skips = sum(step.skip.known is True for step in self._open)
        if not pending:
            return
        flags = _read_flags(pending)
        records = self._read(pending, [skip for skip, _ in flags])
        stuck = False
        for record in records:
            lost = record.skipped and record.next_scale >= record.scale
            self.num_steps += not record.skipped
            self.num_skipped += record.skipped
            self.num_lost += lost
            if not stuck:
                self.streak = (*self.streak, record.reason) if lost else ()
                stuck = len(self.streak) >= self.limit
        self._known_streak = len(self.streak)
        self.last = records[-1]
        for subscription in [*self.subscriptions]:
            subscription.listener(records)
            for record, (_, bad_loss) in zip(records, flags, strict=True):
                if bad_loss and not record.skipped and subscription.on_bad_loss is not None:
                    subscription.on_bad_loss(record)
        if stuck:
            self._raise_stuck(self.last)

    def so_far(self, next_scale: Callable[[], Tensor | None]) -> tuple[int, int, StepRecord | None]:
        """Return applied steps, skipped steps and the last record, with the current round.

        This waits for the device, like :meth:`flush`. `next_scale` returns the present scale [], which the current
        round has not changed yet.
        """
        self.flush()
        if not self._open:
            return self.num_steps, self.num_skipped, self.last
        scale = next_scale()
        skips = read_scalars([step.skip.value for step in self._open])
        records = self._read([replace(step, next_scale=scale) for step in self._open], skips)
        skipped = sum(map(bool, skips))
        return self.num_steps + len(records) - skipped, self.num_skipped + skipped, records[-1]

    def _read(self, steps: Sequence[StepResult], skips: Sequence[float]) -> list[StepRecord]:
        """Read the scales of steps, and the losses of the skipped ones, with one transfer per device."""
        probes = [step.loss_probe if skip else None for step, skip in zip(steps, skips, strict=True)]
        values = read_scalars([*(scale for step in steps for scale in (step.scale, step.next_scale)), *probes])
        used, following, losses = values[: 2 * len(steps) : 2], values[1 : 2 * len(steps) : 2], values[2 * len(steps) :]
        first = self.num_steps + self.num_skipped
        reasons: list[StepReason] = [
            "none" if not skip else "gradient" if math.isfinite(loss) else "loss"
            for skip, loss in zip(skips, losses, strict=True)
        ]
        precision: StepPrecision = self.precision  # pyright: ignore[reportAssignmentType]
        return [
            StepRecord(first + i, s.optimizer_idx, used[i], following[i], bool(skips[i]), reasons[i], precision)
            for i, s in enumerate(steps)
        ]

    # -- a run that is stuck, and checkpoints --------------------------------------------------------------------------

    def _raise_stuck(self, last: StepRecord) -> None:
        streak, self.streak, self._known_streak = self.streak, (), 0
        losses = streak.count("loss")
        text = [
            f"{len(streak)} optimizer steps in a row were skipped (the limit is {self.limit}), the last at loss scale"
            f" {exact(last.scale)}. Reasons: {losses} with a non-finite loss, {len(streak) - losses} with non-finite"
            " gradients under a finite loss."
        ]
        if details := self._describe_skips():
            text.append(f"{details}.")
        causes = [s.cause for s in self.subscriptions if s.cause is not None]
        cause = next(filter(None, (find(last.index + 1 - len(streak)) for find in causes)), "")
        if cause:
            text.append(cause)
        elif not causes and self._has_callbacks:
            text.append("Attach `OverflowLocator()`: it finds the operation, and tries remedies.")
        if not cause and losses < len(streak) and last.scale > 1:
            text.append(
                "The loss scale cannot fall any further: pass a smaller `scaler` or `min_scale`, or leave both."
            )
        if not cause and self.precision == "fp16":
            how = ": `Trainer(plugins=[AmpPrecision('bf16')])`, `fit(..., ckpt_path=...)`"
            text.append(
                "To try bf16, which has the range of fp32, resume from the last checkpoint before these steps"
                f"{how if self._has_callbacks else ''}."
            )
        elif not cause and self.precision != "fp32":
            text.append("Run the module with precision 'fp32' to see whether it happens there too.")
        raise FloatingPointError(" ".join(text))

    def state(self) -> dict[str, Any]:
        """Return plain numbers and strings only, so that a checkpoint loads with `weights_only=True`."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "consecutive_skips": list(self.streak),
            "last_step": None if self.last is None else list(astuple(self.last)),
        }

    def load(self, saved: Saved) -> None:
        """Continue from :meth:`state`. Raise `ValueError`, and change nothing, if an entry is missing or wrong."""
        streak = saved.entries("consecutive_skips")
        if not set(map(str, streak)) <= {"loss", "gradient"}:
            raise saved.wrong("consecutive_skips", 'a list of "loss" and "gradient"')
        self.restore(saved.count("num_steps"), saved.count("num_skipped"), streak, saved.record("last_step"))


def _read_flags(steps: Sequence[StepResult]) -> list[tuple[float, float]]:
    """Read, with one transfer per device, whether each step was skipped, and whether it had a bad loss to report."""
    flags = read_scalars([flag.value for step in steps for flag in (step.skip, step.reported_bad_loss)])
    return list(zip(flags[::2], flags[1::2], strict=True))


class StepCounts:
    """The counters of an object with `records` and a `scaler`."""

    records: RecordLog
    scaler: Any

    @property
    def last_step(self) -> StepRecord | None:
        """Return the last attempted optimizer step. This waits for the device."""
        return self._so_far()[2]

    @property
    def num_steps(self) -> int:
        """Count the applied optimizer steps; in a Trainer, of all its fits. This waits for the device."""
        return self._so_far()[0]

    @property
    def num_skipped(self) -> int:
        """Count the skipped optimizer steps; in a Trainer, of all its fits. This waits for the device."""
        return self._so_far()[1]

    def _state(self) -> dict[str, Any]:
        """Return the scale, the counts and the last step, as plain numbers and strings."""
        return {"scaler": None if self.scaler is None else self.scaler.state_dict(), **self.records.state()}

    def _so_far(self) -> tuple[int, int, StepRecord | None]:
        return self.records.so_far(lambda: None if self.scaler is None else self.scaler.scale_tensor)
