"""The plugin's entry in a checkpoint, and those of other plugins that it reads."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from lightning_amp import _messages
from lightning_amp._numbers import literal
from lightning_amp.scaling import DerivativeScale, DynamicLossScaler, RecordLog, Saved, check_scaler_state

STOCK_KEY = "MixedPrecision"
"""Where stock Lightning keeps its scaler: ours is written there too, so that a run can go back."""

STOCK_FSDP_KEY = "FSDPPrecision"
"""The same for `FSDPStrategy`."""

_DERIVATIVES = "derivative_scale"  # only in runs that have used it

_KEYS = ("AmpPrecision", "FSDPAmpPrecision", STOCK_KEY, STOCK_FSDP_KEY, "native_amp_scaling_state")


def dump(scaler: torch.amp.GradScaler | None, log: RecordLog, derivatives: DerivativeScale) -> dict[str, Any]:
    """Plain numbers and strings only, so that a checkpoint loads with `weights_only=True`."""
    last = log.last
    derivative_scale = derivatives.state()
    return {
        "scaler": None if scaler is None else scaler.state_dict(),
        "num_steps": log.num_steps,
        "num_skipped": log.num_skipped,
        "consecutive_skips": list(log.streak),
        "last_step": None if last is None else list(astuple(last)),
        **({} if derivative_scale is None else {_DERIVATIVES: derivative_scale}),
    }


def load(
    state: dict[str, Any],
    scaler: torch.amp.GradScaler | None,
    log: RecordLog,
    derivatives: DerivativeScale,
    name: str,
) -> None:
    """Continue from `state`: ours, or a bare `GradScaler` state.

    Args:
        state: The entry.
        scaler: Of the plugin; changed only if all entries are right, as are the next two.
        log: Of the plugin.
        derivatives: Of the plugin.
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
        if _DERIVATIVES in saved:
            derivatives.load(saved, _DERIVATIVES)
        log.restore(*counters)
    if scaler is None or not scaler_state:
        return  # bf16 and fp32 have nothing to restore; fp16 from a bf16 checkpoint starts its scale afresh
    if isinstance(scaler, DynamicLossScaler):
        for setting, (mine, theirs) in scaler.overridden(scaler_state).items():
            _messages.info(
                f"lightning_amp: `{setting}={literal(mine)}`, as passed, is used; the checkpoint had {literal(theirs)}."
            )
    else:
        scaler_state = {**scaler_state, **_passed(scaler, scaler_state)}
    scaler.load_state_dict(scaler_state)


def find(checkpoint: dict[str, Any]) -> str | None:
    """Where the first entry is that holds a scaler's state, whoever wrote it."""
    return next((key for key in _KEYS if checkpoint.get(key)), None)


def _passed(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> dict[str, Any]:
    """Settings of somebody else's scaler that differ from torch's defaults: the user must have passed them."""
    defaults = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    mine = {name: getattr(scaler, f"get_{name}")() for name in defaults}
    passed = {n: v for n, v in mine.items() if v != defaults[n] and state.get(n, v) != v}
    for name, value in passed.items():
        _messages.info(
            f"lightning_amp: `{name}={literal(value)}`, as passed, is used; the checkpoint had {literal(state[name])}."
        )
    return passed
