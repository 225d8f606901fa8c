"""Bundles: files with one step that overflowed, which `OverflowLocator` saves and :func:`replay` runs again."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor

from lightning_amp._containers import replace
from lightning_amp._files import open_to_read
from lightning_amp.tracing._conditions import RandomState

_NOT_A_BUNDLE = "This is not a bundle of `OverflowLocator`, or one of a later version"
_ENTRIES: Mapping[str, tuple[type, ...]] = {
    "module_state": (Mapping,), "batch": (object,), "batch_idx": (int,), "random_state": (Mapping,),
    "scale": (int, float), "loss_divisor": (int, float),
}  # fmt: skip
"""The entries that a replay needs, and their types."""


def make_bundle(
    *, module_state: Mapping[str, Any], batch: Any, batch_idx: int, random_state: RandomState, scale: float,
    loss_divisor: float, report: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Make a bundle on the CPU: a plain dictionary for `torch.save`.

    Args:
        module_state: The `state_dict` before the step.
        batch: The batch as passed to the step.
        batch_idx: Its index.
        random_state: The random generators before the step.
        scale: The loss scale of the step.
        loss_divisor: Divisor of the loss: the number of micro-batches per step.
        report: Further information in plain types.

    """
    cpu = torch.device("cpu")
    return {
        "format": 1,
        "module_state": {name: copy_to(value, cpu) for name, value in module_state.items()},
        "batch": copy_to(batch, cpu),
        "batch_idx": batch_idx,
        "random_state": random_state.pack(),
        "scale": scale,
        "loss_divisor": loss_divisor,
        "report": dict(report),
    }


def load_bundle(bundle: str | os.PathLike[str] | Mapping[str, Any], weights_only: bool) -> Mapping[str, Any]:
    """Return a bundle, loaded from its file to the CPU; a dictionary is returned unchanged.

    Raises:
        ValueError: If it is not a bundle, if an entry is missing or of another type, or if its batch has classes that
            cannot be loaded or must not be.

    """
    loaded: Any = bundle if isinstance(bundle, Mapping) else _load(bundle, weights_only)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{_NOT_A_BUNDLE}: it is a `{type(loaded).__name__}`.")
    loaded = cast(Mapping[str, Any], loaded)
    if loaded.get("format") != 1:
        raise ValueError(f"{_NOT_A_BUNDLE}: it has {list(loaded)}.")
    for name, kinds in _ENTRIES.items():
        if name not in loaded:
            raise ValueError(f"The bundle is damaged: it has no entry `{name}`.")
        if not isinstance(loaded[name], kinds):
            raise ValueError(f"The bundle is damaged: its entry `{name}` is a `{type(loaded[name]).__name__}`.")
    return loaded


def _load(path: str | os.PathLike[str], weights_only: bool) -> Any:
    with open_to_read(path, "binary", "bundle") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=weights_only)
        except Exception as error:  # for a damaged file, torch raises many kinds of exceptions
            raise _why_not_loaded(path, error, weights_only) from error


def _why_not_loaded(path: str | os.PathLike[str], error: Exception, weights_only: bool) -> ValueError:
    classes = _classes(path) if weights_only and isinstance(error, UnpicklingError) else []
    if classes:
        names = ", ".join(f"`{name}`" for name in classes[:4]) + (", ..." if len(classes) > 4 else "")
        return ValueError(
            f"`{path}` holds more than tensors and plain containers ({names}), which `weights_only=True` refuses,"
            " because such a file can run code. If you trust it, pass `weights_only=False` to `replay`."
        )
    if isinstance(error, (AttributeError, ImportError)):
        return ValueError(
            f"`{path}` holds objects of a class that cannot be found here ({error}). Call `replay` where the class can"
            " be imported under its name in the run; a class of the training script itself is in `__main__`."
        )
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ValueError(f"{_NOT_A_BUNDLE}, or it is damaged: `{path}` cannot be loaded ({text}).")


def _classes(path: str | os.PathLike[str]) -> list[str]:
    try:
        with open_to_read(path, "binary") as file:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # not a file of `torch.save`, or a damaged one
        return []


def copy_to(value: Any, device: torch.device) -> Any:
    """Copy the tensors in nested containers and dataclasses to `device`; objects with a `.to` move themselves."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, copy=True)
        if isinstance(value, (MutableMapping, type)) or not callable(getattr(value, "to", None)):
            return value
        return value.to(device)  # Lightning moves batches by this rule, too

    return replace(value, moved)
