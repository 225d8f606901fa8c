"""The choice of fp8 layers, with the reason for each other layer, and the legal recipes."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fp8 import emulated, float8, needs_torchao
from torch import nn
from torchmetrics import Metric

from lightning_amp.casting import _float8 as recipes
from lightning_amp.casting._float8 import (
    choose_fp8_layers,
    nothing_qualifies,
)

pytestmark = needs_torchao

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Loud(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Quiet(nn.Linear):
    """Inherits `forward`, as the class that FSDP2 makes for a sharded layer."""


class Distance(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 32)

    def update(self) -> None: ...

    def compute(self) -> None: ...


def many() -> nn.ModuleDict:
    layer: dict[str, nn.Module] = {
        "metric": Distance(),
        "first": nn.Linear(32, 32),
        "fine": nn.Linear(32, 48, bias=False),
        "odd": nn.Linear(32, 40),
        "loud": Loud(32, 32),
        "sharded": Quiet(32, 32),
        "own": nn.Linear(32, 32),
        "frozen": nn.Linear(32, 32).requires_grad_(False),
        "wide": nn.Linear(32, 32).double(),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
        "attention": nn.MultiheadAttention(32, 2),
        "fp32": nn.Linear(32, 32),
        "last": nn.Linear(32, 32),
    }
    layer["own"].forward = lambda x: x
    layer["again"] = layer["fine"]
    return nn.ModuleDict(layer)


def test_each_layer_has_its_reason() -> None:
    module = many()
    assert choose_fp8_layers(module, {module["fp32"]}, emulated(), CPU) == {
        "metric.net": "inside a metric",
        "first": "the first linear layer",
        "fine": None,
        "odd": "32 x 40: not both are multiples of 16",
        "loud": "a subclass or the user has replaced its `forward`",
        "sharded": None,
        "own": "a subclass or the user has replaced its `forward`",
        "frozen": "frozen; it runs in fp8 once it is unfrozen",
        "wide": "its weight is float64",
        "normed": "its weight is computed from something else (a parametrization, pruning)",
        "attention.out_proj": "`nn.MultiheadAttention` uses its weight and never calls it",
        "fp32": "in `fp32_modules`",
        "last": "the last linear layer",
    }


@pytest.mark.parametrize(
    ("recipe", "inputs", "outputs", "chosen"),
    [
        ("rowwise_with_gw_hp", 1024, 8192, False),
        ("rowwise_with_gw_hp", 2048, 4096, False),
        ("rowwise_with_gw_hp", 2064, 4096, True),
        ("rowwise", 8192, 2048, False),
        ("rowwise", 8192, 2064, True),
        ("tensorwise", 4096, 1024, False),
        ("tensorwise", 4112, 1024, True),
        ("tensorwise", 1024, 1040, True),
    ],
)
def test_small_layers_stay_in_bf16_on_cuda(recipe: str, inputs: int, outputs: int, chosen: bool) -> None:
    Float8LinearConfig = float8().Float8LinearConfig
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(16, 16), nn.Linear(inputs, outputs), nn.Linear(16, 16))
    config = Float8LinearConfig.from_recipe_name(recipe)
    for spelled in (recipe, config):
        why = choose_fp8_layers(module, set(), spelled, CUDA)["1"]
        assert (why is None) is chosen
        assert chosen or why == f"{inputs} x {outputs}: too small, casts would cost more than fp8 saves"
    assert choose_fp8_layers(module, set(), emulated(recipe), CUDA)["1"] is None, "where it is emulated nothing gains"


def test_nothing_qualifies_says_why_and_what_else_there_is() -> None:
    class Conv1D(nn.Module):  # of GPT-2
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.position = nn.Parameter(torch.ones(4, 4))

    module = nn.Sequential(
        nn.Embedding(4, 4),
        *(Conv1D() for _ in range(3)),
        nn.LSTM(4, 4),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
    )
    layers = choose_fp8_layers(module, set(), emulated(), CPU)
    assert nothing_qualifies(module, layers).splitlines() == [
        "precision 'fp8' has nothing to do here: none of the 3 linear layers qualifies.",
        "  - the first linear layer: `5`",
        "  - 8 x 8: not both are multiples of 16: `6`",
        "  - the last linear layer: `7`",
        "  - 4 layers with a weight matrix, but no `nn.Linear`: `Conv1D` (3), `LSTM` (1)",
    ]


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_names_and_configurations_are_taken() -> None:
    assert recipes.checked_recipe(None) == "rowwise_with_gw_hp"
    assert recipes.checked_recipe("tensorwise") == "tensorwise"
    assert recipes.checked_recipe(emulated()) is not None


@pytest.mark.parametrize("bad", ["row", 8, True, object(), "e4m3"])
def test_anything_else_is_refused_with_what_is_legal(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"must be one of 'rowwise_with_gw_hp', 'rowwise', 'tensorwise', a `torchao"):
        recipes.checked_recipe(bad)


def test_a_configuration_that_changes_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather=True"):
        recipes.checked_recipe(float8().Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def test_names_pad_what_a_ragged_batch_needs_padded() -> None:
    assert not recipes.config_of("rowwise_with_gw_hp").pad_inner_dim  # no sum over rows is in fp8
    assert recipes.config_of("rowwise").pad_inner_dim
    assert recipes.config_of("tensorwise").pad_inner_dim
    own = float8().Float8LinearConfig()
    assert recipes.config_of(own) is own


@pytest.mark.parametrize(
    ("capability", "hip", "arch", "expected"),
    [
        ((8, 0), None, "", False),
        ((8, 9), None, "", True),
        ((9, 0), None, "", True),
        ((9, 0), "6.2", "gfx90a", False),
        ((9, 4), "6.2", "gfx942:sramecc+", True),
    ],
)
def test_hardware(
    capability: tuple[int, int], hip: str | None, arch: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert recipes.has_fp8(torch.device("cuda", 0)) is expected
    assert not recipes.has_fp8(torch.device("cpu"))


def test_torchao_is_named_where_it_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ModuleNotFoundError, match="needs torchao, which is not installed. Run `pip install 'torchao>="):
        recipes.config_of("rowwise")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.1")
    with pytest.raises(ImportError, match=r"needs torchao 0.18 or later; torchao 0.17.1 is installed"):
        recipes.config_of("rowwise")
