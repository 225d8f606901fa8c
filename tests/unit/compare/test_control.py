"""The control moves every weight by its last bit, in the same way in every run with one seed."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_amp.compare._train import LastBitMover, move_last_bits

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def moved_by(before: Tensor, after: Tensor) -> Tensor:
    """The signed number of steps from one floating-point number to another with the same sign."""
    kind = INTEGERS[before.dtype]
    steps = after.view(kind).long() - before.view(kind).long()
    return torch.where(before < 0, -steps, steps)  # the bits of a negative number grow downwards


@pytest.mark.parametrize("dtype", INTEGERS)
def test_each_value_moves_by_its_last_bit(dtype: torch.dtype) -> None:
    module = nn.Linear(40, 30, dtype=dtype)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert move_last_bits(module, 0) == 40 * 30 + 30
    for name, parameter in module.named_parameters():
        steps = moved_by(before[name], parameter.detach())[before[name] != 0]  # zero is among few bf16 numbers
        assert set(steps.unique().tolist()) == {-1, 1}
        assert 0.3 < (steps > 0).float().mean() < 0.7
        assert parameter.requires_grad
        assert parameter.is_leaf


def test_edges_of_the_format() -> None:
    module = nn.ParameterList([torch.tensor([0.0, 1.0, math.nan, math.inf, torch.finfo().tiny] * 20)])
    move_last_bits(module, 0)
    zeros, ones, nans, infinities, tiny = module[0].detach().reshape(20, 5).unbind(1)
    smallest = 2.0**-149
    assert set(zeros.tolist()) == {-smallest, smallest}
    assert set(ones.tolist()) == {1 - 2.0**-24, 1 + 2.0**-23}
    assert nans.isnan().all()
    assert set(infinities.tolist()) == {math.inf, torch.finfo().max}
    assert set(tiny.tolist()) == {torch.finfo().tiny - smallest, torch.finfo().tiny + smallest}


def test_the_same_seed_moves_the_same_way() -> None:
    def moved(seed: int) -> Tensor:
        module = nn.Linear(20, 20)
        nn.init.constant_(module.weight, 0.5)
        move_last_bits(module, seed)
        return module.weight.detach()

    assert torch.equal(moved(3), moved(3))
    assert not torch.equal(moved(3), moved(4))


def test_the_random_numbers_of_the_run_stay_as_they_are() -> None:
    module = nn.Linear(20, 20)
    before = torch.get_rng_state()
    move_last_bits(module, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_parameters_move_once() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    before = module[0].weight.detach().clone()
    assert move_last_bits(module, 0) == 64
    assert module[0].weight is module[1].weight
    assert set(moved_by(before, module[0].weight.detach()).unique().tolist()) == {-1, 1}


def test_values_that_stay() -> None:
    """Frozen and meta parameters, formats without a next number, and buffers."""
    module: Any = nn.ParameterDict(
        {
            "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
            "float16": torch.ones(3, dtype=torch.float16),
            "meta": torch.ones(3, device="meta"),
            "integers": nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False),
            "empty": torch.ones(0),
        }
    )
    module.register_buffer("buffer", torch.ones(3))
    assert move_last_bits(module, 0) == 0
    for name in ("frozen", "float16", "integers"):
        assert torch.equal(module[name], torch.ones_like(module[name]))
    assert torch.equal(module.buffer, torch.ones(3))
    assert module["meta"].is_meta


def test_nothing_to_move() -> None:
    module = L.LightningModule()
    module.layer = nn.Linear(4, 4).half()
    with pytest.raises(
        ValueError, match=r"in float32, float64 or bfloat16; the module has none\. Pass `control=False`"
    ):
        LastBitMover(0).on_train_start(None, module)
