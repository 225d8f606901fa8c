from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.synthetic import make_plan

from lightning_amp.compare._plan import CONTROL, Margin, Plan

FULL = Plan(
    make_module="Net",
    make_data="data(size=3)",
    arms={"fp32": "AmpPrecision('fp32')", "b | <mine>": "AmpPrecision('bf16')", "a": "Mine()"},
    trainer_kwargs={"max_epochs": "3"},
    seed=5,
    num_seeds=2,
    control=True,
    margins={"val_loss": Margin(0.1), "thing": Margin(0.0, "max")},
)


def test_all_arms_of_a_seed_then_the_next_seed_backwards() -> None:
    """Otherwise a machine that becomes slower would always slow the last arm."""
    assert FULL.reference == "fp32"
    assert FULL.labels == ["fp32", "b | <mine>", "a", CONTROL]
    assert list(FULL.seeds) == [5, 6]
    assert list(FULL.runs()) == [
        *((label, 5) for label in FULL.labels),
        *((label, 6) for label in reversed(FULL.labels)),
    ]
    assert list(make_plan(["fp32", "bf16"], 1).runs()) == [("fp32", 0), ("bf16", 0)]  # without a control


@pytest.mark.parametrize("plan", [FULL, make_plan(["fp32"], 1)])
def test_round_trip(plan: Plan) -> None:
    found = Plan.from_data(json.loads(json.dumps(plan.to_data(), allow_nan=False)))
    assert found == plan
    assert list(found.arms) == list(plan.arms)  # the first is the reference
    assert all(isinstance(margin, Margin) for margin in found.margins.values())


@pytest.mark.parametrize("data", [None, [], "plan", 3, {**FULL.to_data(), "arms": None}])
def test_other_data(data: object) -> None:
    with pytest.raises(ValueError, match="this is not the plan of a comparison"):
        Plan.from_data(data)


TORN: dict[str, list[Any]] = {
    "make_module": [None, 3],
    "make_data": [[]],
    "arms": [None, [], {}, ["fp32"], {"fp32": None}, {"fp32": "x", CONTROL: "y"}],
    "trainer_kwargs": [None, {"max_epochs": 3}],
    "seed": [None, -1, 0.5, "0", True],
    "num_seeds": [None, 0, -1, 2.0],
    "control": [None, 1],
    "margins": [
        None, [], {"a": 0.1}, {"a": [0.1]}, {"a": [0.1, "up"]}, {"a": ["0.1", None]}, {"a": [-0.1, None]},
        {"a": ["nan", None]}, {"a": ["inf", "min"]}, {"a": [math.nan, None]}, {"a": "01"},
    ],
    "measure_speed": [None, False, "sometimes"],
}  # fmt: skip


@pytest.mark.parametrize("name", FULL.to_data())
def test_a_field_is_missing_or_torn(name: str) -> None:
    data = FULL.to_data()
    for wrong in TORN[name]:
        with pytest.raises(ValueError, match=f"this is not the plan of a comparison: its `{name}`: "):
            Plan.from_data({**data, name: wrong})
    del data[name]
    with pytest.raises(ValueError, match=f"this is not the plan of a comparison: .* has no `{name}`"):
        Plan.from_data(data)
