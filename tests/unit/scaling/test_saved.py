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


def test_what_is_right_is_returned() -> None:
    assert saved(3).number("entry") == 3.0
    assert saved(0.5).number("entry", above=0.0) == 0.5
    assert saved(0).count("entry") == 0
    assert saved((1, "x")).entries("entry") == [1, "x"]
    assert saved(None).any("entry") is None
    assert saved(None).record("entry") is None
    assert "entry" in saved(None)
    assert "other" not in saved(None)


@pytest.mark.parametrize("form", [list, tuple])
def test_a_step_comes_back_as_it_was(form: type) -> None:
    """A record is a list, since a checkpoint that loads with `weights_only=True` has no classes."""
    assert saved(form(astuple(RECORD))).record("entry") == RECORD


WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    *[("number", value, {}, "a finite number") for value in (NAN, INF, "1", None, True, [1.0])],
    ("number", 0.0, {"above": 0.0}, "a finite number above 0"),
    *[("count", value, {}, "a whole number of 0 or more") for value in (-1, 1.0, "1", True, None)],
    ("count", 0, {"least": 1}, "a whole number of 1 or more"),
    *[("entries", value, {}, "a list") for value in (None, "ab", {"a": 1}, 3)],
    *[
        ("record", value, {}, "the fields of a step, or none")
        for value in (
            *(3, "abcdef", [1, 2], [*astuple(RECORD), 0], {"index": 3}),
            *([-1, 1, 8.0, 4.0, True, "gradient"], [3, 1.5, 8.0, 4.0, True, "gradient"]),
            *([3, 1, NAN, 4.0, True, "gradient"], [3, 1, 8.0, "4", True, "gradient"]),
            *([3, 1, 8.0, 4.0, 1, "gradient"], [3, 1, 8.0, 4.0, True, "weather"], [3, 1, 8.0, 4.0, True, [1]]),
        )
    ],
]


@pytest.mark.parametrize(("kind", "value", "limits", "rule"), WRONG)
def test_what_is_wrong_is_named(kind: str, value: Any, limits: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^The saved state's entry `a.ckpt: plugin.entry` must be {rule}, got ") as e:
        getattr(saved(value), kind)("entry", **limits)
    assert repr(value) in str(e.value)
    assert "resume from an earlier one, or delete the entry" in str(e.value)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"has no entry `a.ckpt: plugin.other`. The checkpoint is damaged"):
        saved(1).count("other")


@pytest.mark.parametrize("value", [None, [1], "state", 3])
def test_what_is_no_dictionary_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`plugin` must be a dictionary, got"):
        Saved(value, "plugin")


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
