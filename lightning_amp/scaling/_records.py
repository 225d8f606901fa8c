"""What happened to each optimizer step, written on the device and read back in blocks; and who is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.findings import StepPrecision, StepReason, StepRecord
from lightning_amp.scaling import _stuck
from lightning_amp.scaling._step_result import StepResult, read_records, read_scalars

Listener: TypeAlias = Callable[[list[StepRecord]], None]


@final
class Subscription:
    """Somebody who gets the records of a :class:`~lightning_amp.scaling.RecordLog`, until :meth:`close`.

    Args:
        listener: Gets the records, in blocks.
        everybody: Who is subscribed.
        at_once: Hand over what there is at the end of a batch in which a step was skipped.
        on_bad_loss: Gets the record of each step that was taken although its loss was not finite; `None`: nobody asks.
        before_update: Is told the index of a step and its optimizer, right before the update reads hyperparameters.
        cause: Is asked, for the error of a stuck run, why steps were skipped since the one of this index; returns an
            empty text if it does not know. `None`: it does not look for causes.

    """

    def __init__(
        self,
        listener: Listener,
        everybody: list[Subscription],
        *,
        at_once: bool = False,
        on_bad_loss: Callable[[StepRecord], None] | None = None,
        before_update: Callable[[int, Optimizer], None] | None = None,
        cause: Callable[[int], str] | None = None,
    ) -> None:
        self.listener, self.at_once, self.on_bad_loss = listener, at_once, on_bad_loss
        self.before_update, self.cause = before_update, cause
        self._everybody = everybody
        everybody.append(self)

    @property
    def is_open(self) -> bool:
        """Return whether records still come."""
        return self in self._everybody

    def end_losses(self) -> None:
        """Ask no more for steps that were taken although their loss was not finite."""
        self.on_bad_loss = None

    def close(self) -> None:
        """End it; a second time does nothing."""
        if self.is_open:
            self._everybody.remove(self)


@final
class RecordLog:
    """Keeps references to the device's own scalars and turns them into `StepRecord`s one block at a time.

    Appending launches nothing and waits for nothing, since scale tensors are never changed in place. Reading a block
    waits once and transfers the flags, the scales (only the last ones where nobody listens) and, if steps were skipped,
    their losses.

    Args:
        max_consecutive_skips: Raise `FloatingPointError` after this many consecutive skips, when they are read; `None`
            disables the check.
        block: Records that are kept before they are read back.
        describe_skips: Says what is known of the gradients of a run that is stuck, for the error.
        offers_fallback: Whether whoever made it has an argument `fallback`, for the error.

    """

    def __init__(
        self,
        max_consecutive_skips: int | None = 64,
        *,
        block: int = 64,
        describe_skips: Callable[[], str] = str,
        offers_fallback: bool = False,
    ) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self.num_steps = 0
        self.num_skipped = 0
        self.last: StepRecord | None = None
        self._block = block
        self._describe_skips = describe_skips
        self._offers_fallback = offers_fallback
        self._precision: StepPrecision = ""
        self._on_stuck: Callable[[str], None] | None = None
        self.subscriptions: list[Subscription] = []
        """Those that are open."""
        self._pending: list[StepResult] = []  # complete, and not read yet
        self._open: list[StepResult] = []  # the scale that follows is not known yet
        self._in_batch = False  # there are records since the last batch was closed
        self._streak: list[StepReason] = []
        self._known_streak = 0  # the same, as far as the host knows without reading
        self.num_known_skips = 0
        """Skips that the host decided and that were not read back yet."""
        self._blocks = 0  # that are over
        self._is_stuck = False

    @property
    def streak(self) -> tuple[StepReason, ...]:
        """Return why each of the skips in a row happened, up to the last record that was read."""
        return tuple(self._streak)

    def restore(self, num_steps: int, num_skipped: int, streak: Sequence[StepReason], last: StepRecord | None) -> None:
        """Continue the counters of a checkpoint; forgets what was not read yet."""
        self._pending.clear()
        self._open.clear()
        self.num_known_skips = 0
        self.num_steps, self.num_skipped, self._streak = num_steps, num_skipped, list(streak)
        self._known_streak = len(streak)
        self._is_stuck = False
        self._blocks = self.num_attempted // self._block
        self.last = last

    def go_on_in(
        self, precision: StepPrecision, max_consecutive_skips: int, on_stuck: Callable[[str], None] | None = None
    ) -> None:
        """Note what the steps to come are taken in. If the run was stuck it is not any more: the count starts at 0.

        Args:
            precision: Of the steps to come; those so far were read back.
            max_consecutive_skips: Of these steps.
            on_stuck: Is told why, instead of an error, if these are stuck by their gradients: at the end of a batch,
                the same one on all ranks, and again at later ones until somebody calls this method.

        """
        self._precision, self.max_consecutive_skips, self._on_stuck = precision, max_consecutive_skips, on_stuck
        if self._is_stuck:
            self._end_streak()

    def _end_streak(self) -> None:
        self._streak, self._known_streak, self._is_stuck = [], 0, False

    # -- listening -----------------------------------------------------------------------------------------------------

    @property
    def wants_losses(self) -> bool:
        """Return whether somebody wants to know of steps that were taken although their loss was not finite."""
        return any(s.on_bad_loss is not None for s in self.subscriptions)

    def subscribe(self, listener: Listener, *, at_once: bool = False, **also: Any) -> Subscription:
        """Have `listener` receive all records to come, in blocks, at no extra cost.

        Args:
            listener: Gets a list of records, oldest first.
            at_once: Hand over what there is at the end of a batch in which a step was skipped, for those who must act
                on it at once: one wait for the device per batch, none where the host decides, as long as it is open.
            also: What else it wants to know; see :class:`Subscription`. Losses are read with the flags.

        Returns:
            A handle, to be closed.

        """
        return Subscription(listener, self.subscriptions, at_once=at_once, **also)

    def announce(self, optimizer: Optimizer) -> None:
        """Tell subscribers who asked that the update of this optimizer comes next, unless the device skips it."""
        for subscription in self.subscriptions:
            if subscription.before_update is not None:
                subscription.before_update(self.num_attempted, optimizer)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, step: StepResult) -> None:
        """Note an attempted step; :meth:`complete` gives it the scale that follows."""
        self._open.append(step)
        if step.skip.known:
            self._known_streak += 1
            self.num_known_skips += 1
        else:
            self._known_streak = 0

    def complete(self, next_scale: Tensor | None) -> None:
        """Complete the records so far with the scale that follows, in the middle of a batch. Reads nothing back."""
        if self._open:
            self._in_batch = True
            for step in self._open:
                step.complete(next_scale)
            self._pending += self._open
            self._open.clear()

    def close_batch(self, next_scale: Tensor | None) -> None:
        """Complete this batch's records with the scale that follows; reads a full block back."""
        self.complete(next_scale)
        if not self._in_batch:
            return
        at_once = any(s.at_once for s in self.subscriptions)
        if _torch.is_capturing() and not at_once:  # a later batch reads; who cannot wait for it gets CUDA's error
            return
        self._in_batch = False
        stuck = self.max_consecutive_skips is not None and self._known_streak >= self.max_consecutive_skips
        # by the number of steps, not of those to be read: some ranks may have been asked in between
        blocks, before = self.num_attempted // self._block, self._blocks
        self._blocks = blocks
        if stuck or blocks > before or (at_once and self._has_news()):
            self.flush()
            if self._is_stuck and self._on_stuck is not None and self.last is not None:
                self._on_stuck(self._why_stuck(self.last))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def num_attempted(self) -> int:
        """Return how many steps there were, those that were not read back included. Reads nothing."""
        return self.num_steps + self.num_skipped + len(self._pending) + len(self._open)

    def _has_news(self) -> bool:
        """Return whether a step that is not handed over was skipped, or taken with a loss that is not finite.

        Waits for the flags of the latest batch alone.
        """
        unread = [s for s in self._pending if None in (s.skip.known, s.reported_bad_loss.known)]
        values = read_scalars([flag.value for step in unread for flag in (step.skip, step.reported_bad_loss)])
        for step, skip, bad_loss in zip(unread, values[::2], values[1::2], strict=True):
            step.note(skip > 0, bad_loss > 0)
        return any(step.skip.known or step.reported_bad_loss.known for step in self._pending)

    def flush(self) -> None:
        """Read everything back. Waits for the device.

        Raises:
            FloatingPointError: If `max_consecutive_skips` steps in a row were skipped, unless
                :meth:`go_on_in` was given somebody to tell instead.

        """
        pending, self._pending = self._pending, []
        self.num_known_skips = sum(step.skip.known is True for step in self._open)
        if not pending:
            return
        flags = read_scalars([flag.value for step in pending for flag in (step.skip, step.reported_bad_loss)])
        skips, bad_losses = flags[::2], flags[1::2]
        subscriptions = [*self.subscriptions]
        if not subscriptions and not any(skips):
            self.num_steps += len(pending) - 1  # the last one is still to be written down
            pending, skips, bad_losses = pending[-1:], skips[-1:], bad_losses[-1:]
        records = read_records(pending, skips, self.num_steps + self.num_skipped, self._precision)
        limit = self.max_consecutive_skips
        for record in records:
            if record.skipped:
                self.num_skipped += 1
                self._streak.append(record.reason)
                self._is_stuck |= limit is not None and len(self._streak) >= limit
            else:
                self.num_steps += 1
                if not self._is_stuck:
                    self._streak.clear()
        self.last = records[-1]
        for subscription in subscriptions:
            subscription.listener(records)
            for record, is_bad in zip(records, bad_losses, strict=True):
                if is_bad and not record.skipped and subscription.on_bad_loss is not None:
                    subscription.on_bad_loss(record)
        if self._is_stuck and (self._on_stuck is None or _stuck.by_losses(self._streak)):
            self._raise_stuck(self.last)

    def so_far(self, next_scale: Tensor | None) -> tuple[int, int, StepRecord | None]:
        """Return applied and skipped steps, and the last one, those of the batch that runs included.

        Waits for the device.

        Args:
            next_scale: In force now, []; that of a batch that has not ended is not known.

        Raises:
            FloatingPointError: As :meth:`flush`.

        """
        self.flush()
        if not self._open:
            return self.num_steps, self.num_skipped, self.last
        skips = read_scalars([step.skip.value for step in self._open])
        steps = [replace(step, next_scale=next_scale) for step in self._open]
        records = read_records(steps, skips, self.num_steps + self.num_skipped, self._precision)
        skipped = sum(map(bool, skips))
        return self.num_steps + len(records) - skipped, self.num_skipped + skipped, records[-1]

    def _why_stuck(self, last: StepRecord) -> str:
        details = self._describe_skips()
        return _stuck.why(self._streak, self.max_consecutive_skips, last.scale) + (f" {details}." if details else "")

    def _raise_stuck(self, last: StepRecord) -> None:
        since = last.index + 1 - len(self._streak)
        causes = [s.cause for s in self.subscriptions if s.cause is not None]
        known = next(filter(None, (cause(since) for cause in causes)), "") or _stuck.advice(
            self._streak,
            last.scale,
            last.next_scale,
            precision=last.precision,
            fallback=self._offers_fallback and self._precision == "fp16",
            is_located=bool(causes),
        )
        text = f"{self._why_stuck(last)} {known}"
        self._end_streak()
        raise FloatingPointError(text)
