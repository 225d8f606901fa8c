"""Keep records and scales in checkpoints, and read the states of torch's own scaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any, cast

import torch
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._text import literal
from lightning_amp.findings import StepPrecision, StepRecord
from lightning_amp.scaling._derivative_scale import DerivativeScale
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._saved import Saved, check_scaler_state
from lightning_amp.scaling._scaler import DynamicLossScaler

_DERIVATIVES = "derivative_scale"  # saved only if the run has used it


@final
class Ledger:
    """The records of all steps of a plugin in one Trainer or loop, and the scale of its derivatives.

    The scaler decides how many skips in a row raise `FloatingPointError`. `describe_skips` then describes the gradients
    for its message. `offers` are `offers_fallback` and `has_callbacks` of :class:`RecordLog`.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, describe_skips: Callable[[], str], **offers: bool) -> None:
        self._new_log = partial(RecordLog, describe_skips=describe_skips, **offers)
        self._last_trainer = LastTrainer()
        self.log = self._new_log(_skip_limit(scaler))
        self.derivatives = DerivativeScale()

    def begin(self, trainer: Any, scaler: torch.amp.GradScaler | None) -> bool:
        """Begin a fit, and return whether it continues the last fit, in the same Trainer."""
        goes_on = self._last_trainer.goes_on(trainer)
        before, self.log = self.log, self._new_log(_skip_limit(scaler))
        if goes_on:
            self.log.restore(before.num_steps, before.num_skipped, before.streak, before.last)
        else:
            self.derivatives = DerivativeScale()
        return goes_on

    def knows(self, trainer: Any) -> bool:
        """Return whether the last fit was one of this Trainer."""
        return self._last_trainer.knows(trainer)

    def go_on_in(
        self,
        precision: str,
        scaler: torch.amp.GradScaler | None,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """Record the precision of the next steps, and the function to call if they are stuck."""
        self.log.go_on_in(cast(StepPrecision, precision), _skip_limit(scaler), on_stuck)

    def so_far(self, scaler: torch.amp.GradScaler | None) -> tuple[int, int, StepRecord | None]:
        """Return the numbers of applied and skipped steps, and the last step. This waits for the device."""
        scaler = enabled(scaler)
        return self.log.so_far(None if scaler is None else _torch.scale_tensor(scaler))

    def clear(self) -> None:
        """Reset everything, before a checkpoint is loaded."""
        self.log.restore(0, 0, (), None)
        self.derivatives = DerivativeScale()

    def state(self, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
        """Return plain numbers and strings only, so that a checkpoint loads with `weights_only=True`."""
        log, derivative_scale = self.log, self.derivatives.state()
        return {
            "scaler": None if scaler is None else scaler.state_dict(),
            "num_steps": log.num_steps,
            "num_skipped": log.num_skipped,
            "consecutive_skips": list(log.streak),
            "last_step": None if log.last is None else list(astuple(log.last)),
            **({} if derivative_scale is None else {_DERIVATIVES: derivative_scale}),
        }

    def load(self, state: dict[str, Any], scaler: torch.amp.GradScaler | None, name: str) -> list[str]:
        """Continue from :meth:`state`, or from a bare `GradScaler` state, which errors call `name`.

        Return a sentence for each setting of the scaler that stays as the user passed it. If an entry is missing or
        wrong, it changes nothing and raises a `ValueError`.
        """
        saved = Saved(state, name)
        ours = "num_steps" in saved or "scaler" in saved
        scaler_state = saved.any("scaler") if ours else state
        if scaler is not None and scaler_state is not None and scaler_state != {}:
            check_scaler_state(scaler_state, f"{name}.scaler" if ours else name)
        if ours:
            streak = saved.entries("consecutive_skips")
            if not set(map(str, streak)) <= {"loss", "gradient"}:
                raise saved.wrong("consecutive_skips", 'a list of "loss" and "gradient"')
            counters = (saved.count("num_steps"), saved.count("num_skipped"), streak, saved.record("last_step"))
            if _DERIVATIVES in saved:  # loaded first, because it may be refused
                self.derivatives.load(saved, _DERIVATIVES)
            self.log.restore(*counters)
        if scaler is not None and scaler_state:  # fp16 from a bf16 checkpoint starts with a new scale
            return _load_scaler(scaler, scaler_state)
        return []


def _skip_limit(scaler: torch.amp.GradScaler | None) -> int:
    return scaler.max_consecutive_skips if isinstance(scaler, DynamicLossScaler) else 64


def _load_scaler(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> list[str]:
    if isinstance(scaler, DynamicLossScaler):
        passed = scaler.overridden(state)
    else:  # settings that differ from torch's defaults must come from the user
        defaults = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        mine = {name: getattr(scaler, f"get_{name}")() for name in defaults}
        passed = {n: (v, state[n]) for n, v in mine.items() if v != defaults[n] and state.get(n, v) != v}
        state = {**state, **{name: value for name, (value, _) in passed.items()}}
    scaler.load_state_dict(state)
    return [
        f"lightning_amp: `{setting}={literal(mine)}`, as passed, is used; the checkpoint had {literal(theirs)}."
        for setting, (mine, theirs) in passed.items()
    ]


def enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return the scaler if it is enabled, else `None`."""
    return scaler if scaler is not None and scaler.is_enabled() else None
