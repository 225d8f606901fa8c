"""What is returned: a tuple with attributes, also in copies."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from lightning_amp import AmpPrecision
from lightning_amp.tuning import Fp32Rules

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
    with pytest.raises(AttributeError, match="`cost` cannot be set"):
        FOUND.cost = 1.0
