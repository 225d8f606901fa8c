from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_amp import DynamicLossScaler

TRACES = json.loads((Path(__file__).parent / "traces.json").read_text())
POLICY = {"init_scale": 64.0, "growth_interval": 4, "min_scale": 1.0}


def one_step(scaler: torch.amp.GradScaler, parameter: nn.Parameter, overflow: bool) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = None
    scaler.scale(parameter.sum()).backward()
    if overflow:
        parameter.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


def scales(scaler: torch.amp.GradScaler, overflows: list[bool]) -> list[float]:
    parameter = nn.Parameter(torch.ones(2))
    out: list[float] = []
    for overflow in overflows:
        one_step(scaler, parameter, overflow)
        out.append(scaler.get_scale())
    return out


@pytest.mark.parametrize("pattern", TRACES["patterns"])
@pytest.mark.parametrize(("policy", "hysteresis"), [("torch (hysteresis 1)", 1), ("megatron", 2)])
def test_traces(policy: str, hysteresis: int, pattern: str) -> None:
    expected = next(traces for name, traces in TRACES["policies"].items() if name.startswith(policy))[pattern]
    scaler = DynamicLossScaler(**POLICY, hysteresis=hysteresis)
    assert scales(scaler, [c == "O" for c in TRACES["patterns"][pattern]]) == expected


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    init_exponent=st.integers(0, 20),
    growth_factor=st.sampled_from([2.0, 1.1, 4.0]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.9]),
    growth_interval=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_equals_torch_inside_the_limits(
    overflows: list[bool], init_exponent: int, growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    policy: dict[str, Any] = {
        "init_scale": 2.0**init_exponent,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    ours = DynamicLossScaler(**policy, min_scale=1e-30, max_scale=1e38, max_consecutive_skips=1000)
    assert scales(ours, overflows) == scales(torch.amp.GradScaler("cpu", **policy), overflows)


@given(overflows=st.lists(st.booleans(), max_size=60), hysteresis=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_limits_hold(overflows: list[bool], hysteresis: int) -> None:
    scaler = DynamicLossScaler(
        8.0, growth_interval=1, min_scale=2.0, max_scale=32.0, hysteresis=hysteresis, max_consecutive_skips=1000
    )
    assert all(2.0 <= scale <= 32.0 for scale in scales(scaler, overflows))


def test_static_scale_never_moves() -> None:
    assert set(scales(DynamicLossScaler.static(1024.0), [True, False] * 5)) == {1024.0}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("growth_factor", 1.0),
        ("growth_factor", "2"),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("growth_interval", 2.5),
        ("hysteresis", 0),
        ("max_consecutive_skips", 0),
        ("init_scale", float("nan")),
        ("init_scale", 2.0**30),
        ("init_scale", True),
        ("min_scale", 0.0),
        ("max_scale", float("inf")),
    ],
)
def test_bad_settings_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{argument}`"):
        DynamicLossScaler(**{argument: value})


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "state_dict"])
@pytest.mark.parametrize("hysteresis", [1, 3])
def test_state_continues(how: str, hysteresis: int) -> None:
    kwargs: dict[str, Any] = {"growth_interval": 3, "hysteresis": hysteresis}
    head, tail = [True, False, False, True], [True, False, False, False, True, True, True]
    whole = scales(DynamicLossScaler(**kwargs), head + tail)
    scaler = DynamicLossScaler(**kwargs)
    scales(scaler, head)
    if how == "state_dict":
        other = DynamicLossScaler(**kwargs)
        other.load_state_dict(scaler.state_dict())
    else:
        other = copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    assert scales(other, tail) == whole[len(head) :]


def test_disabled_does_nothing() -> None:
    scaler = DynamicLossScaler(enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})


def test_update_takes_a_new_scale() -> None:
    scaler = DynamicLossScaler(max_scale=2.0**20)
    parameter = nn.Parameter(torch.ones(2))
    one_step(scaler, parameter, overflow=False)
    scaler.scale(parameter.sum())
    scaler.update(512.0)
    assert scaler.get_scale() == 512.0
    scaler.update(2.0**30)
    assert scaler.get_scale() == 2.0**20


@pytest.mark.parametrize(
    "scaler", [DynamicLossScaler(enabled=False), DynamicLossScaler(2.0**-3, growth_interval=5, max_scale=1e9)]
)
def test_repr_is_how_it_was_made(scaler: DynamicLossScaler) -> None:
    text = repr(scaler)
    assert repr(eval(text)) == text
    assert "e+" not in text
    assert "e-" not in text
    assert repr(DynamicLossScaler()) == "DynamicLossScaler()"
