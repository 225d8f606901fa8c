"""Choose the precision in which a stuck run goes on, and change to it between two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, get_args

import torch
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._text import listed
from lightning_amp.casting import Choice, Precision, parse_precision
from lightning_amp.findings import StepPrecision
from lightning_amp.scaling import Saved

_PRECISION, _BEGAN_IN = "precision", "began_in"  # the key in a checkpoint


@final
class Fallback:
    """The checked argument `fallback`, and the position of a run in this list.

    If `"auto"` picks a precision of the list, the list begins behind it, so that one configuration serves all machines.
    A checkpoint also stores the precision in which a run began, because another machine or measurement may pick another
    precision for `"auto"`.

    Attributes:
        reached: The precision that the run fell back to; `None` before it fell back.
        resumed: The precision that a checkpoint gave to `"auto"`; `None` if it is the one that was picked.
        why_stuck: The reason why the run is stuck, until the batch is over; else empty.

    """

    def __init__(self, precisions: Any, requested: Precision) -> None:
        self._names = _checked(precisions, requested)
        self._is_auto = requested == "auto"
        self.forget()

    def forget(self) -> None:
        """Reset everything except the settings."""
        self.reached: Choice | None = None
        self._picked: Choice | None = None  # as if there were no checkpoint
        self.resumed: Choice | None = None
        self.why_stuck = ""

    @property
    def moved(self) -> bool:
        """Return whether the run's precision differs from the one that the settings alone would give."""
        return self.reached is not None or self.resumed is not None

    @property
    def _began_in(self) -> Choice | None:
        return self.resumed or self._picked

    def begin(self, start: Choice, device: torch.device, *, goes_on: bool, fitting: bool) -> Choice:
        """Return the precision of a run that begins.

        Refuse a fit that could fall back to a precision that the device cannot run.

        Args:
            start: The precision without any fallback.
            device: The run's device.
            goes_on: Whether the Trainer has trained before.
            fitting: Whether it trains.

        """
        if not fitting:
            return (self.reached or self.resumed or start) if goes_on else start
        self._picked, self.why_stuck = start, ""
        if not goes_on:
            self.reached = self.resumed = None
        for choice in self.left:
            choice.require(device, "fallback")
        return self.reached or self.resumed or start

    @property
    def left(self) -> list[Choice]:
        """Return the precisions to which the run can still fall back."""
        names, now = self._names, self.reached or self._began_in
        if now is not None and now.name in names:
            names = names[names.index(now.name) + 1 :]
        return [Choice.of(name) for name in names]

    @property
    def said(self) -> str:
        """Describe these precisions for the line at the start of a fit; empty without the argument."""
        if not self._names:
            return ""
        names = [choice.name for choice in self.left]
        return f"fallback {' then '.join(names)}" if names else "`fallback` is left unused"

    def note_stuck(self, why: str) -> None:
        """Remember the reason until the batch is over, because a training step may be running now."""
        self.why_stuck = why

    def go_on(self, before: Choice, change: Callable[[Choice], None]) -> None:
        """Call `change` with the next precision, and warn of the reason."""
        why, self.why_stuck = self.why_stuck, ""
        self.reached = choice = self.left[0]
        change(choice)
        left = [repr(other.name) for other in self.left]
        _messages.warn(
            f"lightning_amp: {why} Training in {before.name!r} is stuck, and goes on in {choice.name!r}"
            f"{', without a loss scale' if before.name == 'fp16' else ''}. If it is stuck there too,"
            f" {f'{listed(left)} is next' if left else 'it stops'}."
        )

    def restart(self) -> Choice | None:
        """Return to the precision that the run would have without a checkpoint; `None` if no run has begun."""
        self.reached = self.resumed = None
        self.why_stuck = ""
        return self._picked

    def state(self) -> dict[str, str]:
        """Return entries for a checkpoint."""
        if self._began_in is None:
            return {}
        return {_PRECISION: (self.reached or self._began_in).name, _BEGAN_IN: self._began_in.name}

    def resume(self, saved: Saved, device: torch.device) -> Choice | None:
        """Load the entries of :meth:`state`, and return the precision in which to continue.

        `None` if it does not change.
        """
        if _PRECISION not in saved or self._began_in is None:
            return None  # the checkpoint is from another plugin, or holds a scaler only
        names = [str(saved.any(key)) for key in (_PRECISION, _BEGAN_IN)]
        for key, name in zip((_PRECISION, _BEGAN_IN), names, strict=True):
            if name not in get_args(StepPrecision) or not name:
                raise saved.wrong(key, "the name of a precision")
        now, began_in = names
        mine = self._began_in.name
        if self._is_auto:
            now, began_in = ("bf16" if name == "fp8" else name for name in names)  # "auto" is never fp8
            if began_in != mine:
                choice = Choice.of(began_in)
                choice.require(device, "the checkpoint's precision")
                self.resumed = choice
        if now == began_in and self.resumed is not None:
            _messages.info(
                f"lightning_amp: the run of the checkpoint is in {names[0]!r}; it goes on in {now!r}, although 'auto'"
                f" is {mine!r} here. To change that, pass a precision."
            )
            return self.resumed
        if now == began_in or (now == mine and self.resumed is None):
            return None
        fell_back = f"the run of the checkpoint was stuck in {began_in!r} and fell back to {now!r}"
        if began_in != mine and self.resumed is None:  # the user now requests another precision
            _messages.info(f"lightning_amp: {fell_back}; this one is in {mine!r}, as passed.")
            return None
        choice = Choice.of(now)
        choice.require(device, "the checkpoint's precision")
        self.reached = choice
        _messages.info(f"lightning_amp: {fell_back}, in which it goes on.")
        return choice


def _checked(precisions: Any, requested: Precision) -> tuple[Precision, ...]:
    """Return our names; refuse `"auto"`, `requested`, a name twice, and precisions in which a stuck run stays stuck."""
    fine = isinstance(precisions, Iterable) and not isinstance(precisions, (str, bytes))
    one = f"Write `fallback=[{precisions!r}]`." if isinstance(precisions, (str, int, torch.dtype)) else ""
    require(fine, "fallback", "a sequence of precisions", precisions, one)
    names: list[Precision] = []
    for value in cast("Iterable[Any]", precisions):
        name = parse_precision(value, "fallback")
        if name == "auto":
            raise ValueError("`fallback` must name precisions, got 'auto': write which, for example ['bf16', 'fp32'].")
        if name not in ("bf16", "fp32"):
            raise ValueError(
                f"`fallback` must hold 'bf16' or 'fp32', got {value!r}: a run that overflows in another precision"
                f" overflows in {name!r} too."
            )
        if name == requested:
            raise ValueError(f"`fallback` must differ from `precision={requested!r}`, got {value!r}. Leave it out.")
        if name in names:
            raise ValueError(f"`fallback` must name each precision once, got {value!r} again.")
        names.append(name)
    return tuple(names)
