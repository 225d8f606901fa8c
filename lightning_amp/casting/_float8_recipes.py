"""Check the recipes of fp8. A recipe defines how values are scaled before they are rounded to 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_amp._compat import _torchao

DEFAULT_RECIPE = "rowwise_with_gw_hp"
RECIPES = (DEFAULT_RECIPE, "rowwise", "tensorwise")


def checked_recipe(recipe: Any) -> Any:
    """Return the name of a recipe, or a `torchao.float8.Float8LinearConfig` unchanged; refuse everything else.

    A configuration that changes the class of the parameters is refused too.
    """
    if recipe is None:
        return DEFAULT_RECIPE
    if isinstance(recipe, str) and recipe in RECIPES:
        return recipe
    if type(recipe).__name__ != "Float8LinearConfig":
        legal = ", ".join(repr(known) for known in RECIPES)
        raise ValueError(
            f"`fp8_recipe` must be one of {legal}, a `torchao.float8.Float8LinearConfig`, or `None`; got {recipe!r}."
        )
    if getattr(recipe, "enable_fsdp_float8_all_gather", False):
        raise ValueError(
            "`fp8_recipe` has `enable_fsdp_float8_all_gather=True`, which replaces the parameters by tensors of another"
            " class: checkpoints would not load without torchao. Leave it out; weights are then gathered in their own"
            " dtype."
        )
    return recipe


def config_of(recipe: Any) -> Any:
    """Return the configuration of a checked recipe; raise an `ImportError` without a recent torchao.

    A name stands for torchao's own configuration, except that rows are padded where a product needs a multiple of 16.
    So the last batch of an epoch may have any size.
    """
    float8 = _torchao.torchao_float8()
    if not isinstance(recipe, str):
        return recipe
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return config if recipe == DEFAULT_RECIPE else replace(config, pad_inner_dim=True)


def name_of(recipe: Any) -> str:
    """Return the name of a recipe in messages."""
    if isinstance(recipe, str):
        return f"recipe {recipe!r}"
    return "own recipe, emulated" if recipe.emulate else "own recipe"


def emulates(recipe: Any) -> bool:
    """Return whether a recipe computes the results of fp8 hardware on other hardware."""
    return bool(getattr(recipe, "emulate", False))


def has_fp8(device: torch.device) -> bool:
    """Return whether the device has instructions for fp8 products."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip:  # MI300 and later
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)
