"""Records and scales outlive a fit. A checkpoint is read whole or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import quiet_trainer

from lightning_amp import DynamicLossScaler
from lightning_amp.findings import StepRecord
from lightning_amp.precision._entries import find_entry
from lightning_amp.scaling import Ledger

LAST = StepRecord(6, 0, 64.0, 32.0, True, "gradient")


def used() -> tuple[Ledger, DynamicLossScaler]:
    """Return a ledger and a scaler after some steps."""
    ledger, scaler = Ledger(None, str), DynamicLossScaler(32.0)
    ledger.log.restore(5, 2, ["loss", "gradient"], LAST)
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    ledger.derivatives.grad(scaler, x.sum(), x)
    return ledger, scaler


def fresh() -> tuple[Ledger, DynamicLossScaler]:
    return Ledger(None, str), DynamicLossScaler()


def test_a_state_goes_round() -> None:
    ledger, scaler = used()
    state = ledger.state(scaler)
    assert "derivative_scale" in state
    again, its_scaler = fresh()
    again.load(copy.deepcopy(state), its_scaler, "entry")
    assert again.state(its_scaler) == state
    assert again.log.last == LAST
    assert again.log.streak == ("loss", "gradient")


def test_what_was_not_used_is_not_written() -> None:
    ledger, _ = fresh()
    assert ledger.state(None) == {
        "scaler": None, "num_steps": 0, "num_skipped": 0, "consecutive_skips": [], "last_step": None,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [DynamicLossScaler, lambda: torch.amp.GradScaler("cpu")])
def test_a_bare_scaler_state_moves_the_scale_alone(kind: Any) -> None:
    """Stock Lightning writes such a state, and counts no steps."""
    ledger, _ = used()
    scaler = kind()
    ledger.load(torch.amp.GradScaler("cpu", init_scale=256.0).state_dict(), scaler, "MixedPrecision")
    assert scaler.get_scale() == 256.0
    assert (ledger.log.num_steps, ledger.log.num_skipped, ledger.log.last) == (5, 2, LAST)


def test_somebody_elses_scaler_keeps_what_it_was_given() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    state = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=4.0).state_dict()
    said = fresh()[0].load(state, scaler, "entry")
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_growth_factor()) == (256.0, 7, 4.0)
    assert said == ["lightning_amp: `growth_interval=7`, as passed, is used; the checkpoint had 2000."]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_steps", -1),
        ("num_skipped", "2"),
        ("consecutive_skips", ["loss", "luck"]),
        ("last_step", [1, 2]),
        ("derivative_scale", [0.0, 0.0]),
        ("scaler", {"scale": 0.0}),
        ("scaler", {"scale": 8.0}),  # the rest is missing
    ],
)
def test_one_wrong_entry_changes_nothing(key: str, value: Any) -> None:
    ledger, scaler = used()
    state = Ledger(None, str).state(DynamicLossScaler(4.0)) | {"derivative_scale": [2.0, 0.0]} | {key: value}
    before = copy.deepcopy(ledger.state(scaler))
    with pytest.raises(ValueError, match=rf"`checkpoint\.{key}"):
        ledger.load(state, scaler, "checkpoint")
    assert ledger.state(scaler) == before


def test_the_first_entry_with_something_in_it_is_read() -> None:
    keys = ["AmpPrecision", "FSDPAmpPrecision", "MixedPrecision", "FSDPPrecision", "native_amp_scaling_state"]
    entries: dict[str, Any] = {key: {"scale": 1.0} for key in reversed(keys)}
    for key in keys:
        assert find_entry(entries) == key
        entries[key] = {}  # a scaler that was disabled
    assert find_entry(entries) is None


def test_it_goes_on_in_the_same_trainer_and_starts_afresh_in_another() -> None:
    first, second = quiet_trainer(), quiet_trainer()
    ledger, _ = used()
    assert not ledger.begin(first, 64)
    assert ledger.state(None) == fresh()[0].state(None)
    ledger.log.restore(5, 2, ["loss"], LAST)
    assert ledger.begin(first, 64)
    assert (ledger.log.num_steps, ledger.log.num_skipped, ledger.log.last) == (5, 2, LAST)
    assert ledger.log.streak == ("loss",)
    assert not ledger.begin(second, 64)
    assert ledger.log.last is None
