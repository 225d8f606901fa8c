"""What happened to each optimizer step, written on the device and read back in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_amp._numbers import exact

Reason = Literal["none", "loss", "gradient"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted optimizer step. Immutable.

    .. code-block:: python

        plugin = AmpPrecision("fp16")
        L.Trainer(plugins=[plugin], max_epochs=1).fit(model, data)
        print(plugin.last_step)  # StepRecord(index=7, optimizer_idx=0, scale=2048.0, ..., reason='none')

    Attributes:
        index: Optimizer steps attempted before this one, over all optimizers of the run.
        optimizer_idx: Which optimizer, in the order of `configure_optimizers`.
        scale: Loss scale used for this step; 1.0 without scaling.
        next_scale: Loss scale after the update that followed, at the end of the batch.
        skipped: Whether the step was dropped.
        reason: `"none"`; `"loss"` if the loss itself was not finite; `"gradient"` if only gradients were.

    """

    index: int
    optimizer_idx: int
    scale: float
    next_scale: float
    skipped: bool
    reason: Reason


_Open: TypeAlias = "tuple[int, Tensor | None, Tensor | bool, Tensor | None]"  # optimizer_idx, scale, found_inf, loss


class RecordLog:
    """Keeps references to the device's own scalars and turns them into `StepRecord`s one block at a time.

    Appending launches nothing and waits for nothing, since scale tensors are never changed in place. Reading a block
    waits once and transfers the flags, the scales (only the last ones where nobody listens) and, if steps were skipped,
    their losses.

    Who appends to `listeners` gets the records in blocks, for free. As long as anybody is in `listeners_at_once`, every
    batch is read back at its end: one wait for the device per batch, for those who must act on a skip at once.

    Args:
        max_consecutive_skips: So many skips in a row raise `FloatingPointError` when they are read; `None` never.
        block: Records that are kept before they are read back.

    """

    def __init__(self, max_consecutive_skips: int | None = 64, *, block: int = 64) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self.block = block
        self.num_steps = 0
        self.num_skipped = 0
        self.last: StepRecord | None = None
        self.listeners: list[Callable[[list[StepRecord]], None]] = []
        self.listeners_at_once: list[Callable[[list[StepRecord]], None]] = []
        self.describe_skips: Callable[[], str] = str
        self._pending: list[tuple[_Open, Tensor | None]] = []  # with the scale that followed
        self._open: list[_Open] = []  # it is not known yet
        self._in_batch = False  # there are records since the last batch was closed
        self._streak: list[Reason] = []
        self._known_skips = 0
        self._known_streak = 0  # the same, as far as the host knows without reading

    @property
    def streak(self) -> tuple[Reason, ...]:
        """Why each of the skips in a row happened, up to the last record that was read."""
        return tuple(self._streak)

    def restore(self, num_steps: int, num_skipped: int, streak: list[Reason], last: StepRecord | None) -> None:
        """Continue the counters of a checkpoint; forgets what was not read yet."""
        self._pending.clear()
        self._open.clear()
        self._known_skips = 0
        self.num_steps, self.num_skipped, self._streak = num_steps, num_skipped, list(streak)
        self._known_streak = len(streak)
        self.last = last

    @property
    def num_known_skips(self) -> int:
        """Skips that the host decided and that were not read back yet."""
        return self._known_skips

    def append(self, optimizer_idx: int, scale: Tensor | None, found_inf: Tensor | bool, loss: Tensor | None) -> None:
        """Note an attempted step.

        Args:
            optimizer_idx: Which optimizer.
            scale: The scale used, shape []; `None` without scaling.
            found_inf: 1.0 for a skip, shape []; or a bool where the host knows.
            loss: Shape []; finite exactly if the losses of this step were.

        """
        self._open.append((optimizer_idx, scale, found_inf, loss))
        if found_inf is True:
            self._known_streak += 1
            self._known_skips += 1
        else:
            self._known_streak = 0

    def complete(self, next_scale: Tensor | None) -> None:
        """Complete the records so far with the scale that follows, in the middle of a batch. Reads nothing back."""
        self._in_batch |= bool(self._open)
        for step in self._open:
            self._pending.append((step, next_scale))
        self._open.clear()

    def close_batch(self, next_scale: Tensor | None) -> None:
        """Complete this batch's records with the scale that follows; reads a full block back."""
        self.complete(next_scale)
        if not self._in_batch:
            return
        self._in_batch = False
        stuck = self.max_consecutive_skips is not None and self._known_streak >= self.max_consecutive_skips
        if stuck or self.listeners_at_once or len(self._pending) >= self.block:
            self.flush()

    def flush(self) -> None:
        """Read everything back. Waits for the device.

        Raises:
            FloatingPointError: If `max_consecutive_skips` steps in a row were skipped.

        """
        pending, self._pending = self._pending, []
        self._known_skips = sum(found_inf is True for _, _, found_inf, _ in self._open)
        if not pending:
            return
        skips = _read([found_inf for (_, _, found_inf, _), _ in pending])
        listeners = (*self.listeners, *self.listeners_at_once)
        if not listeners and not any(skips):
            self.num_steps += len(pending) - 1  # the last one is still to be written down
            pending, skips = pending[-1:], skips[-1:]
        scales = _read([scale for (_, used, _, _), next_scale in pending for scale in (used, next_scale)])
        losses = _read([loss if skipped else None for ((*_, loss), _), skipped in zip(pending, skips, strict=True)])
        records: list[StepRecord] = []
        stuck = False
        for i, (((optimizer_idx, *_), _), skipped) in enumerate(zip(pending, map(bool, skips), strict=True)):
            reason: Reason = "none"
            if skipped:
                reason = "gradient" if math.isfinite(losses[i]) else "loss"
            records.append(
                StepRecord(
                    self.num_steps + self.num_skipped, optimizer_idx, scales[2 * i], scales[2 * i + 1], skipped, reason
                )
            )
            if skipped:
                self.num_skipped += 1
                self._streak.append(reason)
                stuck |= len(self._streak) == self.max_consecutive_skips
            else:
                self.num_steps += 1
                if not stuck:
                    self._streak.clear()
        self.last = records[-1]
        for listener in listeners:
            listener(records)
        if stuck:
            self._raise_stuck()

    def _raise_stuck(self) -> None:
        streak, self._streak, self._known_streak = self._streak, [], 0
        num_loss = streak.count("loss")
        assert self.last is not None
        details = self.describe_skips()
        advice = _BROKEN_FORWARD if num_loss > len(streak) // 2 else _advice_on_gradients(self.last)
        raise FloatingPointError(
            f"{len(streak)} optimizer steps in a row were skipped (the limit is {self.max_consecutive_skips}), the last"
            f" at loss scale {exact(self.last.scale)}: {num_loss} with a non-finite loss, {len(streak) - num_loss} with"
            f" non-finite gradients under a finite loss. {details}{'. ' if details else ''}{advice}."
        )


_BROKEN_FORWARD = (
    "The forward pass itself is broken: look at the data and at the learning rate, or run the module with precision"
    " 'fp32' to see whether it happens there too"
)


def _advice_on_gradients(last: StepRecord) -> str:
    if last.scale == last.next_scale == 1:
        return (
            "The gradients are not finite although the loss is, and no scale is to blame: look for roots, logarithms"
            " and quotients at 0, which want an epsilon, and run the module with precision 'fp32' to see whether it"
            " happens there too"
        )
    if last.scale == last.next_scale > 1:
        return (
            "The gradients overflow although the loss is finite, and this scale does not fall: use a smaller static"
            " scale or `min_scale`, or leave `scaler` out for a dynamic one"
        )
    return (
        "The gradients overflow although the loss is finite: look for a module whose gradients are unusually large,"
        " keep it in fp32, clip its inputs, or use 'bf16', whose range is that of fp32"
    )


def _read(values: list[Tensor | bool | None]) -> list[float]:
    """Scalars to the host with one transfer per device; `None` reads as 1.0 (no scaling)."""
    out = [1.0 if v is None else float(v) if isinstance(v, bool) else 0.0 for v in values]
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for v in values:
        if isinstance(v, Tensor):
            by_device.setdefault(v.device, {})[id(v)] = v
    read: dict[int, float] = {}
    for unique in by_device.values():
        tensors = [t if t.dtype == torch.float32 and t.dim() == 0 else t.reshape(()).float() for t in unique.values()]
        read.update(zip(unique, torch.stack(tensors).tolist(), strict=True))
    return [read[id(v)] if isinstance(v, Tensor) else o for v, o in zip(values, out, strict=True)]
