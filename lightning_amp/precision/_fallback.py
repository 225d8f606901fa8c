"""Precisions in which a run goes on when it is stuck, and the change from one to the next between two batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast, get_args

import torch
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._compat import _torch
from lightning_amp._text import listed
from lightning_amp.casting import Choice, Precision, parse_precision
from lightning_amp.findings import StepPrecision
from lightning_amp.precision._hooks import RunHooks
from lightning_amp.precision._ledger import Ledger
from lightning_amp.precision._settings import Settings
from lightning_amp.scaling import DynamicLossScaler, Saved

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
        self._picked = start
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

    def advance(self) -> Choice:
        """Go on in the next precision, and return it."""
        self.reached = self.left[0]
        return self.reached

    def restart(self) -> Choice | None:
        """Be where the run began without any checkpoint, and return it; `None` if none has begun."""
        self.reached = self.resumed = None
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
            return None  # by an older version
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


class FallsBack(RunHooks):
    """A plugin whose run may change its precision between two batches."""

    scaler: torch.amp.GradScaler | None
    _offers_fallback = True
    _fallback: Fallback
    _settings: Settings
    _ledger: Ledger
    _choice: Choice | None
    _why_stuck = ""

    @property
    def _skip_limit(self) -> int:
        return self.scaler.max_consecutive_skips if isinstance(self.scaler, DynamicLossScaler) else 64

    def _set_precision(self, choice: Choice) -> None:
        """Settle the precision, and with it the scaler and what the records say."""
        self._choice = choice
        if choice.name != "fp16":
            self.scaler = None
        elif self.scaler is None:
            self.scaler = self._settings.scaler("fp16")
        if self.scaler is not None:
            _torch.set_scaler_device(self.scaler, self.device)

    def _begin_records(self) -> None:
        on_stuck = self._note_stuck if self._fallback.left else None
        self._ledger.log.go_on_in(cast(StepPrecision, self._settled().name), self._skip_limit, on_stuck)

    def _go_on_in(self, choice: Choice) -> None:
        """Change the precision between two batches."""
        self._set_precision(choice)
        run = self._run
        if run is not None:
            evaluation = self._settings.evaluation(choice, run.module.trainer.strategy.root_device)
            run.go_on_in(choice, evaluation, self.scaler)
        self._begin_records()

    def _note_stuck(self, why: str) -> None:
        self._why_stuck = why  # until the batch is over: who asks may be in the middle of a training step

    def _fall_back_if_stuck(self) -> None:
        """Go on in the next precision if the batch that ended was one skip too many. All ranks do so together."""
        why, self._why_stuck = self._why_stuck, ""
        if not why:
            return
        before = self._settled().name
        self._ledger.log.flush()  # what there is was taken in the old one
        scaled = self.scaler is not None
        choice = self._fallback.advance()
        self._go_on_in(choice)
        left = [repr(other.name) for other in self._fallback.left]
        _messages.warn(
            f"lightning_amp: {why} Training in {before!r} is stuck, and goes on in {choice.name!r}"
            f"{', without a loss scale' if scaled else ''}. If it is stuck there too,"
            f" {f'{listed(left)} is next' if left else 'it stops'}."
        )

    def _resume_precision(self, saved: Saved) -> None:
        """Go on in the precision of a checkpoint."""
        run = self._run
        if run is not None:
            choice = self._fallback.resume(saved, run.module.trainer.strategy.root_device)
            if choice is not None:
                self._go_on_in(choice)

    def _restart_precision(self) -> None:
        """Be in the precision in which the run began, as before a checkpoint says more."""
        self._why_stuck = ""
        start = self._fallback.restart()
        if start is not None and start != self._choice and self._run is not None:
            self._go_on_in(start)

    @override
    def forward_context_of(self, precision: str) -> Any:
        run = self._run
        if run is None or precision in ("", run.forward.training.name):
            return self.forward_context()
        with run.forward.pretending(Choice.of(precision)):
            return self.forward_context()
