"""The returned tuple and its copies, and relative errors in words."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
from torch import nn

from lightning_amp import AmpPrecision
from lightning_amp.tune import Fp32Rules
from lightning_amp.tune.fp32_modules._result import DistanceToFp32, relative_error

FOUND = Fp32Rules(
    ["head", nn.LayerNorm],
    cost=1.25,
    message="Because.",
    tried=7,
    gradient_errors=(0.5, 0.01),
    metric_errors={"val_loss": (0.1, 0.0)},
)


def test_it_is_a_tuple_that_the_plugin_takes() -> None:
    assert tuple(FOUND) == ("head", nn.LayerNorm)
    assert isinstance(FOUND, tuple)
    assert AmpPrecision("fp16", fp32_modules=FOUND).fp32_modules == ("head", nn.LayerNorm)
    assert repr(FOUND) == repr(("head", nn.LayerNorm))


@pytest.mark.parametrize("again", [copy.copy(FOUND), copy.deepcopy(FOUND), pickle.loads(pickle.dumps(FOUND))])
def test_a_copy_has_all_of_it(again: Fp32Rules) -> None:
    assert type(again) is Fp32Rules
    assert again == FOUND
    assert (again.cost, again.message, again.tried) == (1.25, "Because.", 7)
    assert (again.gradient_errors, again.metric_errors) == ((0.5, 0.01), {"val_loss": (0.1, 0.0)})


def test_nothing_can_be_set() -> None:
    with pytest.raises(AttributeError, match="`cost` cannot be set: a result does not change"):
        FOUND.cost = 1.0


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        (1.1, 1.0, 0.1),
        (-1.1, -1.0, 0.1),
        (0.0, 0.0, 0.0),
        (0.02, 0.0, 0.02),  # the difference itself
        (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_relative_error(value: float, reference: float, error: float) -> None:
    assert relative_error(value, reference) == pytest.approx(error)


@pytest.mark.parametrize(
    ("distance", "text", "beyond"),
    [
        (DistanceToFp32(0.01), "gradients differ by 1 %", ""),
        (DistanceToFp32(0.2, {"a": 0.01, "b": 3.4}), "gradients differ by 20 % and `b` differs by 340 %", None),
        (DistanceToFp32(0.01, {"a": math.inf}), "gradients differ by 1 % and `a` is not finite", "`a` is not finite"),
        (DistanceToFp32(math.inf, {}, "the loss is not finite"), "the loss is not finite", None),
    ],
)
def test_a_distance_in_words(distance: DistanceToFp32, text: str, beyond: str | None) -> None:
    """All errors, and the errors beyond a tolerance; `None` stands for the same words."""
    assert distance.within(0.05) == (beyond == "")
    assert distance.describe() == text
    assert distance.describe(0.05) == (text if beyond is None else beyond)
