"""What outlives a fit: records and scales, in checkpoints too, and the entries of other plugins that are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any, cast

import torch
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _torch
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._text import literal
from lightning_amp.casting import Choice
from lightning_amp.findings import StepPrecision, StepRecord
from lightning_amp.precision._settings import enabled
from lightning_amp.scaling import DerivativeScale, DynamicLossScaler, RecordLog, Saved, check_scaler_state

STOCK_KEY = "MixedPrecision"
"""Where stock Lightning keeps its scaler: ours is written there too, so that a run can go back."""

STOCK_FSDP_KEY = "FSDPPrecision"
"""The same for `FSDPStrategy`."""

_DERIVATIVES = "derivative_scale"  # only in runs that have used it

_KEYS = ("AmpPrecision", "FSDPAmpPrecision", STOCK_KEY, STOCK_FSDP_KEY, "native_amp_scaling_state")


@final
class Ledger:
    """The records of all steps that a plugin has seen in one Trainer, and the scale of its derivatives.

    Args:
        scaler: Of the plugin; says how many skips in a row raise `FloatingPointError`.
        describe_skips: Says what is known of the gradients then.
        offers_fallback: Whether the plugin has the argument `fallback`.

    """

    def __init__(
        self, scaler: torch.amp.GradScaler | None, describe_skips: Callable[[], str], *, offers_fallback: bool = False
    ) -> None:
        self._new_log = partial(RecordLog, describe_skips=describe_skips, offers_fallback=offers_fallback)
        self._last_trainer = LastTrainer()
        self.log = self._new_log(_skip_limit(scaler))
        self.derivatives = DerivativeScale()

    def begin(self, trainer: Any, scaler: torch.amp.GradScaler | None) -> bool:
        """Begin a fit; returns whether it goes on where the last one ended, in the same Trainer."""
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
        self, choice: Choice, scaler: torch.amp.GradScaler | None, on_stuck: Callable[[str], None] | None
    ) -> None:
        """Note what the steps to come are taken in, and who is told if these are stuck; see `RecordLog.go_on_in`."""
        self.log.go_on_in(cast(StepPrecision, choice.name), _skip_limit(scaler), on_stuck)

    def so_far(self, scaler: torch.amp.GradScaler | None) -> tuple[int, int, StepRecord | None]:
        """Return applied and skipped steps, and the last one. Waits for the device."""
        scaler = enabled(scaler)
        return self.log.so_far(None if scaler is None else _torch.scale_tensor(scaler))

    def clear(self) -> None:
        """Forget everything; a checkpoint says what was."""
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

    def load(self, state: dict[str, Any], scaler: torch.amp.GradScaler | None, name: str) -> None:
        """Continue from :meth:`state`, or from a bare `GradScaler` state.

        Args:
            state: The entry.
            scaler: Of the plugin. Nothing is changed unless all entries are right.
            name: What errors call the entry.

        Raises:
            ValueError: If an entry is missing or wrong.

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
            if _DERIVATIVES in saved:  # before the rest: it may be refused
                self.derivatives.load(saved, _DERIVATIVES)
            self.log.restore(*counters)
        if scaler is not None and scaler_state:  # bf16 and fp32 have none; fp16 from a bf16 checkpoint starts afresh
            _load_scaler(scaler, scaler_state)


def _skip_limit(scaler: torch.amp.GradScaler | None) -> int:
    return scaler.max_consecutive_skips if isinstance(scaler, DynamicLossScaler) else 64


def _load_scaler(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
    if isinstance(scaler, DynamicLossScaler):
        passed = scaler.overridden(state)
    else:  # settings of somebody else's scaler that differ from torch's defaults: the user must have passed them
        defaults = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        mine = {name: getattr(scaler, f"get_{name}")() for name in defaults}
        passed = {n: (v, state[n]) for n, v in mine.items() if v != defaults[n] and state.get(n, v) != v}
        state = {**state, **{name: value for name, (value, _) in passed.items()}}
    for setting, (mine, theirs) in passed.items():
        _messages.info(
            f"lightning_amp: `{setting}={literal(mine)}`, as passed, is used; the checkpoint had {literal(theirs)}."
        )
    scaler.load_state_dict(state)


def find_entry(checkpoint: dict[str, Any]) -> str | None:
    """Return the key of the first entry that holds a scaler's state, whoever wrote it."""
    return next((key for key in _KEYS if checkpoint.get(key)), None)
