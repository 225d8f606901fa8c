"""The error for a wrong entry of a checkpoint has its name, its rule and the next step."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from lightning_amp.findings import StepRecord
from lightning_amp.scaling import DynamicLossScaler, Saved
from lightning_amp.scaling._checkpoint import check_scaler_state

NAN, INF = float("nan"), float("inf")
RECORD = StepRecord(3, 1, 8.0, 4.0, True, "gradient")


def saved(value: Any) -> Saved:
    return Saved({"entry": value}, "a.ckpt: plugin")


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("scale", 0.0),
        ("growth_factor", NAN),
        ("backoff_factor", -0.5),
        ("growth_interval", 0),
        ("_growth_tracker", -1),
        ("min_scale", 0.0),
        ("max_scale", INF),
        ("hysteresis", 0),
        ("max_consecutive_skips", 1.5),
        ("_hysteresis_tracker", "2"),
    ],
)  # fmt: skip
def test_each_entry_of_a_scaler_is_checked(key: str, bad: Any) -> None:
    state = DynamicLossScaler().state_dict()
    assert key in state
    with pytest.raises(ValueError, match=rf"`scaler\.{key}` must be "):
        check_scaler_state(state | {key: bad}, "scaler")
    if key in torch.amp.GradScaler("cpu").state_dict():
        with pytest.raises(ValueError, match=rf"no entry `scaler\.{key}`"):
            check_scaler_state({name: value for name, value in state.items() if name != key}, "scaler")


def test_a_step_of_an_older_version_has_no_precision() -> None:
    assert saved(list(astuple(RECORD))[:-1]).record("entry") == RECORD
    assert saved([*astuple(RECORD)[:-1], "bf16"]).record("entry").precision == "bf16"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="the fields of a step"):
        saved([*astuple(RECORD)[:-1], "bf17"]).record("entry")
