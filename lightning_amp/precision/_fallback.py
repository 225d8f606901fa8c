"""Precisions in which a run goes on when it is stuck, and the change from one to the next between two batches."""

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

_PRECISION, _BEGAN_IN = "precision", "began_in"  # in a checkpoint


@final
class Fallback:
    """The argument `fallback`, checked, and how far along it a run is.

    With `"auto"` a run enters the list where it finds what was picked: that, and what stands before, is passed over, so
    that one configuration serves all machines. With `"auto"` a checkpoint also says in which precision a run began,
    since another machine, or another measurement, may pick another one.

    Args:
        precisions: In any spelling.
        requested: The argument `precision`, by our name.

    Attributes:
        reached: What the run fell back to; `None` as long as it is where it began.
        resumed: What `"auto"` is since a checkpoint said so; `None` if it is what was picked.
        why_stuck: Why the run cannot go on in the precision of now, until the batch is over; empty: it can.

    Raises:
        ValueError: For a name twice, `requested` itself, or what a stuck run cannot go on in.

    """

    def __init__(self, precisions: Any, requested: Precision) -> None:
        self._names = _checked(precisions, requested)
        self._is_auto = requested == "auto"
        self.forget()

    def forget(self) -> None:
        """Have the settings alone."""
        self.reached: Choice | None = None
        self._picked: Choice | None = None  # without any checkpoint
        self.resumed: Choice | None = None
        self.why_stuck = ""

    @property
    def moved(self) -> bool:
        """Return whether a run is, or was, in another precision than the settings alone would give it."""
        return self.reached is not None or self.resumed is not None

    @property
    def _began_in(self) -> Choice | None:
        return self.resumed or self._picked

    def begin(self, start: Choice, device: torch.device, *, goes_on: bool, fitting: bool) -> Choice:
        """Return the precision of a run that begins.

        Args:
            start: What it is without any fallback.
            device: Where it runs.
            goes_on: Whether its Trainer has trained before.
            fitting: Whether it trains.

        Raises:
            ValueError: If a fit could get to a precision that the device cannot run.

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
        """Return what is left to go on in."""
        names, now = self._names, self.reached or self._began_in
        if now is not None and now.name in names:
            names = names[names.index(now.name) + 1 :]
        return [Choice.of(name) for name in names]

    @property
    def said(self) -> str:
        """Return what is left in a few words, for the first line; empty without the argument."""
        if not self._names:
            return ""
        names = [choice.name for choice in self.left]
        return f"fallback {' then '.join(names)}" if names else "`fallback` is left unused"

    def note_stuck(self, why: str) -> None:
        """Remember it until the batch is over: who asks may be in the middle of a training step."""
        self.why_stuck = why

    def go_on(self, before: Choice, change: Callable[[Choice], None]) -> None:
        """Go on in the next precision, and say why; `change` changes to it."""
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
        """Be where the run began without any checkpoint, and return it; `None` if none has begun."""
        self.reached = self.resumed = None
        self.why_stuck = ""
        return self._picked

    def state(self) -> dict[str, str]:
        """Return entries of a checkpoint."""
        if self._began_in is None:
            return {}
        return {_PRECISION: (self.reached or self._began_in).name, _BEGAN_IN: self._began_in.name}

    def resume(self, saved: Saved, device: torch.device) -> Choice | None:
        """Take up what :meth:`state` left; returns the precision to go on in, `None` if it is that of now.

        Raises:
            ValueError: If an entry is wrong, or the device cannot run that precision.

        """
        if _PRECISION not in saved or self._began_in is None:
            return None  # by another plugin, or of a scaler alone
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
        if began_in != mine and self.resumed is None:  # the user asks for something else now
            _messages.info(f"lightning_amp: {fell_back}; this one is in {mine!r}, as passed.")
            return None
        choice = Choice.of(now)
        choice.require(device, "the checkpoint's precision")
        self.reached = choice
        _messages.info(f"lightning_amp: {fell_back}, in which it goes on.")
        return choice


def _checked(precisions: Any, requested: Precision) -> tuple[Precision, ...]:
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
                f"`fallback` must hold 'bf16' or 'fp32', got {value!r}: what overflows in another precision does so in"
                f" {name!r} too."
            )
        if name == requested:
            raise ValueError(f"`fallback` must differ from `precision={requested!r}`, got {value!r}. Leave it out.")
        if name in names:
            raise ValueError(f"`fallback` must name each precision once, got {value!r} again.")
        names.append(name)
    return tuple(names)
