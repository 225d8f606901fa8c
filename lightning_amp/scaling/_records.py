"""Turn the outcome of a step, which is computed on the device, into the `StepRecord` that the host reads.

:class:`Skip` is the flag of a step, :class:`StepResult` its outcome, and :class:`RecordLog` reads outcomes in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.findings import StepPrecision, StepReason, StepRecord
from lightning_amp.numerics import nonfinite
from lightning_amp.scaling import _scalars, _stuck
from lightning_amp.scaling._scalars import constant, read_scalars


@final
class Skip:
    """Whether an optimizer step was skipped: `Skip.NO`, `Skip.YES`, or a flag that the device still computes.

    Only :meth:`wait` waits for the device. To avoid the wait, read :attr:`known`, or use :meth:`flag` on the
    device.

    """

    __slots__ = ("known", "value")
    NO: ClassVar[Skip]
    YES: ClassVar[Skip]

    def __init__(self, value: Tensor | bool) -> None:
        self.value = value
        self.known: bool | None = None if isinstance(value, Tensor) else value
        """Whether it was skipped; `None` if only the device has the result."""

    @classmethod
    def on_device(cls, flag: Tensor) -> Skip:
        """Return a skip if `flag` [] is above 0. The result is known at once if `flag` is in host memory."""
        if not _scalars.in_host_memory(flag):
            return cls(flag)
        return cls.YES if _scalars.host_value(flag) else cls.NO

    @classmethod
    def if_nonfinite(cls, probe: Tensor | None) -> Skip:
        """Return a skip if `probe` [] is inf or NaN; no skip if it is `None`."""
        if probe is None:
            return cls.NO
        if not _scalars.in_host_memory(probe):
            return cls(nonfinite(probe))
        return cls.NO if math.isfinite(_scalars.host_value(probe)) else cls.YES

    def wait(self) -> bool:
        """Return whether it was skipped. This waits for the device if only the device has the result."""
        return bool(self.value.item()) if isinstance(self.value, Tensor) else self.value

    def flag(self, device: torch.device) -> Tensor:
        """Return 1.0 if it was skipped, else 0.0: float32 [] on `device`. Do not write to this tensor. Never waits."""
        if isinstance(self.value, Tensor):
            return self.value.to(device, torch.float32)
        return constant(float(self.value), device)

    def __or__(self, other: Skip) -> Skip:
        if isinstance(self.value, Tensor) and isinstance(other.value, Tensor):
            return Skip(torch.maximum(self.value, other.value.to(self.value.device)))
        if self.value is False or other.value is True:
            return other
        return self


Skip.NO, Skip.YES = Skip(False), Skip(True)


@final
@dataclass(slots=True, eq=False)
class StepResult:
    """The outcome of one step before the host has read it. Each outcome becomes a :class:`StepRecord`.

    Attributes:
        skip: Whether the step was skipped.
        loss_probe: A value [] that is finite exactly if all losses of this step were; `None` if there was no loss.
        optimizer_idx: Place of the optimizer in `configure_optimizers`.
        scale: Loss scale used, []; `None` without scaling.
        overflow: Whether the scale was too large. If the user repaired the gradients, such a step is still applied.
        had_gradients: Whether any rank had gradients. A step without gradients gives no information about the scale.
        known_bad_loss: Whether the loss was not finite, if the host has read that together with `skip`.
        reported_bad_loss: Whether to report a loss that was not finite; `Skip.NO` if no listener asks for such reports.
        next_scale: The loss scale of the next step, []; set once, when it is known.

    """

    skip: Skip
    loss_probe: Tensor | None = None
    optimizer_idx: int = 0
    scale: Tensor | None = None
    overflow: Skip = Skip.NO
    had_gradients: bool = True
    known_bad_loss: Skip | None = None
    reported_bad_loss: Skip = Skip.NO
    next_scale: Tensor | None = None

    @property
    def bad_loss(self) -> Skip:
        """Return whether the loss was not finite. Such a step is skipped even if its gradients were repaired."""
        return self.known_bad_loss or Skip.if_nonfinite(self.loss_probe)

    def report_loss(self) -> None:
        """Request that :class:`RecordLog` reads whether the loss was finite, together with the skip."""
        self.reported_bad_loss = self.bad_loss

    def note(self, skip: bool, bad_loss: bool) -> None:
        """Record both flags after the host has read them."""
        self.skip = Skip.YES if skip else Skip.NO
        self.reported_bad_loss = Skip.YES if bad_loss else Skip.NO

    def complete(self, next_scale: Tensor | None) -> None:
        """Record the loss scale of the next step, []."""
        self.next_scale = next_scale

    def gradient_overflow(self, device: torch.device) -> Tensor:
        """Return 1.0 if gradients overflowed under a finite loss, else 0.0: [] on `device`."""
        flag = self.overflow.flag(device)
        if self.loss_probe is None:
            return flag
        return flag * (1 - is_from_loss(self.loss_probe, flag).to(torch.float32))


def merge_losses(probe: Tensor | None, loss: Tensor) -> Tensor:
    """Return a probe [] that is finite exactly if `probe` [] and all of `loss` are.

    The first scalar loss costs nothing.
    """
    loss = loss.detach()
    if loss.dim() != 0:
        loss = (loss.float() * 0).sum()
    if probe is None:
        return loss
    return probe.float() * 0 + loss.to(probe.device).float() * 0


def is_from_loss(probe: Tensor, found_inf: Tensor) -> Tensor:
    """Return whether an overflow, `found_inf` [], is due to a non-finite loss: bool [], on the same device."""
    return nonfinite(probe).to(found_inf.device).logical_and(found_inf)


@final
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

    def __init__(
        self,
        listener: Callable[[list[StepRecord]], None],
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
        """Return whether the listener still receives records."""
        return self in self._everybody

    def end_losses(self) -> None:
        """Stop calling `on_bad_loss`."""
        self.on_bad_loss = None

    def close(self) -> None:
        """End the subscription. Close the subscription. A second call does nothing."""
        if self.is_open:
            self._everybody.remove(self)


@final
class RecordLog:
    """Keeps references to scalars on the device and turns them into `StepRecord`s one block at a time.

    Appending a result launches no kernel and does not wait, because scale tensors are never changed in place. Reading a
    block waits for the device once. It transfers the flags, the scales (only the last scales if there is no listener)
    and, if steps were skipped, their losses.

    Args:
        max_consecutive_skips: Raise `FloatingPointError` when the records of this many skips in a row are read. `None`
            disables the check.
        block: Number of records to collect before they are read back.
        describe_skips: Describes the gradients of a stuck run, for the error.
        offers_fallback: Whether the plugin has an argument `fallback`, which the error can then recommend.
        has_callbacks: Whether the run has callbacks, of which the error can then recommend one.

    Attributes:
        num_steps: Applied steps that were read back.
        num_skipped: Skipped steps that were read back.
        last: The last record that was read back.
        streak: The reason of each of the latest skips in a row, up to `last`.
        num_known_skips: Number of skips that the host decided and that were not read back yet.
        subscriptions: The open ones.

    """

    def __init__(
        self,
        max_consecutive_skips: int | None = 64,
        *,
        block: int = 64,
        describe_skips: Callable[[], str] = str,
        offers_fallback: bool = False,
        has_callbacks: bool = True,
    ) -> None:
        self.num_steps = self.num_skipped = self.num_known_skips = 0
        self.last: StepRecord | None = None
        self.streak: tuple[StepReason, ...] = ()
        self.subscriptions: list[Subscription] = []
        self._max_consecutive_skips = max_consecutive_skips
        self._block = block
        self._describe_skips = describe_skips
        self._offers_fallback, self._has_callbacks = offers_fallback, has_callbacks
        self._precision: StepPrecision = ""
        self._on_stuck: Callable[[str], None] | None = None
        self._pending: list[StepResult] = []  # complete records that were not read yet
        self._open: list[StepResult] = []  # records whose next scale is not known yet
        self._in_batch = False  # whether there are records since the last batch ended
        self._known_streak = 0  # number of skips in a row, as far as the host has it without reading
        self._num_blocks = 0
        self._is_stuck = False

    def restore(self, num_steps: int, num_skipped: int, streak: Sequence[StepReason], last: StepRecord | None) -> None:
        """Continue the counters of a checkpoint. Pending records are dropped."""
        self._pending.clear()
        self._open.clear()
        self.num_known_skips = 0
        self.num_steps, self.num_skipped, self.last = num_steps, num_skipped, last
        self._begin_streak(streak)
        self._num_blocks = self.num_attempted // self._block

    def go_on_in(
        self, precision: StepPrecision, max_consecutive_skips: int, on_stuck: Callable[[str], None] | None = None
    ) -> None:
        """Record the precision of the steps to come. The caller has read back all earlier records.

        Args:
            precision: The precision of the steps to come.
            max_consecutive_skips: The limit for these steps. If the run was stuck, their count starts at 0.
            on_stuck: Gets the text, in place of an error, if the gradients of these steps make the run stuck. All ranks
                call it at the end of the same batch, and again after each later batch until :meth:`go_on_in` is called.

        """
        self._precision, self._max_consecutive_skips, self._on_stuck = precision, max_consecutive_skips, on_stuck
        if self._is_stuck:
            self._begin_streak()

    def _begin_streak(self, reasons: Sequence[StepReason] = ()) -> None:
        self.streak, self._known_streak, self._is_stuck = tuple(reasons), len(reasons), False

    # -- listening -----------------------------------------------------------------------------------------------------

    @property
    def wants_losses(self) -> bool:
        """Return whether a listener asks for steps that were applied although their loss was not finite."""
        return any(s.on_bad_loss is not None for s in self.subscriptions)

    def subscribe(
        self, listener: Callable[[list[StepRecord]], None], *, at_once: bool = False, **also: Any
    ) -> Subscription:
        """Have `listener` receive all records to come, in blocks, oldest first. Return a handle, to be closed.

        See :class:`Subscription` for the arguments.

        Cost: nothing; with `at_once` one wait for the device per batch, or none where the host decides.
        """
        return Subscription(listener, self.subscriptions, at_once=at_once, **also)

    def announce(self, optimizer: Optimizer) -> None:
        """Call `before_update` of the listeners: this optimizer updates next, unless the device skips it."""
        for subscription in self.subscriptions:
            if subscription.before_update is not None:
                subscription.before_update(self.num_attempted, optimizer)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, step: StepResult) -> None:
        """Add the result of an attempted step; :meth:`complete` adds the next scale to it."""
        self._open.append(step)
        if step.skip.known:
            self._known_streak += 1
            self.num_known_skips += 1
        else:
            self._known_streak = 0

    def complete(self, next_scale: Tensor | None) -> None:
        """Give all open records their next scale, in the middle of a batch. Reads nothing back."""
        if self._open:
            self._in_batch = True
            for step in self._open:
                step.complete(next_scale)
            self._pending += self._open
            self._open.clear()

    def close_batch(self, next_scale: Tensor | None) -> None:
        """Complete the records of this batch, and read them back if a block is full."""
        self.complete(next_scale)
        if not self._in_batch:
            return
        at_once = any(s.at_once for s in self.subscriptions)
        self._in_batch = False
        limit = self._max_consecutive_skips
        stuck = limit is not None and self._known_streak >= limit
        # All ranks must read in the same batch. So count all steps and not only unread steps, because some ranks may
        # have read in between.
        num_blocks, before = self.num_attempted // self._block, self._num_blocks
        self._num_blocks = num_blocks
        if stuck or num_blocks > before or (at_once and self._has_news()):
            self.flush()
            if self._is_stuck and self._on_stuck is not None and self.last is not None:
                self._on_stuck(self._why_stuck(self.last))

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
            step.note(skip > 0, bad_loss > 0)
        return any(step.skip.known or step.reported_bad_loss.known for step in self._pending)

    def flush(self) -> None:
        """Read everything back. This waits for the device.

        Raise `FloatingPointError` if `max_consecutive_skips` steps in a row were skipped and there is no `on_stuck`.
        """
        pending, self._pending = self._pending, []
        self.num_known_skips = sum(step.skip.known is True for step in self._open)
        if not pending:
            return
        flags = _read_flags(pending)
        subscriptions = [*self.subscriptions]
        if not subscriptions and not any(skip for skip, _ in flags):
            self.num_steps += len(pending) - 1  # only the last step needs a record
            pending, flags = pending[-1:], flags[-1:]
        records = self._read(pending, [skip for skip, _ in flags])
        limit = self._max_consecutive_skips
        for record in records:
            if record.skipped:
                self.num_skipped += 1
                self.streak = (*self.streak, record.reason)
                self._is_stuck |= limit is not None and len(self.streak) >= limit
            else:
                self.num_steps += 1
                if not self._is_stuck:
                    self.streak = ()
        self.last = records[-1]
        for subscription in subscriptions:
            subscription.listener(records)
            for record, (_, bad_loss) in zip(records, flags, strict=True):
                if bad_loss and not record.skipped and subscription.on_bad_loss is not None:
                    subscription.on_bad_loss(record)
        if self._is_stuck and (self._on_stuck is None or _stuck.by_losses(self.streak)):
            self._raise_stuck(self.last)

    def so_far(self, next_scale: Tensor | None) -> tuple[int, int, StepRecord | None]:
        """Return applied steps, skipped steps and the last record, with the current batch.

        This waits for the device, like :meth:`flush`. `next_scale` [] is the present scale; the current batch has not
        changed it yet.
        """
        self.flush()
        if not self._open:
            return self.num_steps, self.num_skipped, self.last
        skips = read_scalars([step.skip.value for step in self._open])
        records = self._read([replace(step, next_scale=next_scale) for step in self._open], skips)
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
        return [
            StepRecord(first + i, s.optimizer_idx, used[i], following[i], bool(skips[i]), reasons[i], self._precision)
            for i, s in enumerate(steps)
        ]

    # -- a run that is stuck -------------------------------------------------------------------------------------------

    def _why_stuck(self, last: StepRecord) -> str:
        details = self._describe_skips()
        return _stuck.why(self.streak, self._max_consecutive_skips, last.scale) + (f" {details}." if details else "")

    def _raise_stuck(self, last: StepRecord) -> None:
        since = last.index + 1 - len(self.streak)
        causes = [s.cause for s in self.subscriptions if s.cause is not None]
        fallback = self._offers_fallback and self._precision == "fp16"
        advice = next(filter(None, (cause(since) for cause in causes)), "") or _stuck.advice(
            self.streak, last, fallback=fallback, is_located=bool(causes) or not self._has_callbacks
        )
        text = f"{self._why_stuck(last)} {advice}"
        self._begin_streak()
        raise FloatingPointError(text)


def _read_flags(steps: Sequence[StepResult]) -> list[tuple[float, float]]:
    """Read, with one transfer per device, whether each step was skipped, and whether it had a bad loss to report."""
    flags = read_scalars([flag.value for step in steps for flag in (step.skip, step.reported_bad_loss)])
    return list(zip(flags[::2], flags[1::2], strict=True))
