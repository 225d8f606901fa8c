"""The legal recipes of fp8, the errors for other values, and the hardware that recipes need."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fp8 import emulated, float8, needs_torchao

from lightning_amp.casting import _float8 as recipes

pytestmark = needs_torchao


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
