"""Parse the arms that a user wrote: a precision by name, the arguments of `AmpPrecision`, or a plugin."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy
from typing_extensions import final

from lightning_amp._arguments import require
from lightning_amp.casting import parse_precision
from lightning_amp.compare._describe import shown
from lightning_amp.compare._plan import CONTROL
from lightning_amp.precision import AmpPrecision, FSDPAmpPrecision


@final
@dataclass(frozen=True)
class ArmSpec:
    """The plugin of an arm, or the arguments from which another process makes the plugin."""

    label: str
    source: Any

    @property
    def description(self) -> str:
        """Return the line of code that makes the plugin."""
        if not isinstance(self.source, Mapping):
            return shown(self.source)
        arguments = [shown(v) if name == "precision" else f"{name}={shown(v)}" for name, v in self.source.items()]
        return f"AmpPrecision({', '.join(arguments)})"

    def plugin(self, strategy: Any = "auto") -> Any:
        """Return the plugin; for FSDP, make the plugin that FSDP accepts from the same arguments."""
        if not isinstance(self.source, Mapping):
            return self.source
        sharded = isinstance(strategy, FSDPStrategy) or (isinstance(strategy, str) and strategy.startswith("fsdp"))
        return (FSDPAmpPrecision if sharded else AmpPrecision)(**self.source)


def parse_arms(precisions: object, strategy: Any = "auto") -> dict[str, ArmSpec]:
    """Return the arms by label, in their order.

    Raises:
        ValueError: If there is no arm, if two have the same label, or if one is not a precision, a plugin or arguments
            of `AmpPrecision`.

    """
    rule = "a sequence of precisions, or a mapping from labels to them"
    is_one = isinstance(precisions, (str, bytes, Precision)) or not isinstance(precisions, Iterable)
    ordered = not isinstance(precisions, (set, frozenset))
    require(ordered, "precisions", rule, precisions, "A set has no first one, which is the reference.")
    require(not is_one, "precisions", rule, precisions, f"Write `precisions=[{precisions!r}]`." if is_one else "")
    assert isinstance(precisions, Iterable)
    is_mapping = isinstance(precisions, Mapping)
    labelled = precisions.items() if is_mapping else [(_label(value), value) for value in precisions]
    require(bool(labelled), "precisions", f"{rule}, at least one", precisions)
    arms: dict[str, ArmSpec] = {}
    for label, value in labelled:
        require(isinstance(label, str) and bool(label.strip()), "precisions", "labelled by texts", label)
        rule = f"labelled by other names than {CONTROL!r}, which is the control's"
        require(label != CONTROL, "precisions", rule, label)
        if label in arms:
            advice = "a mapping gives each arm a label: `{'bf16, head in fp32': dict(precision='bf16', ...)}`"
            raise ValueError(f"`precisions` must have different labels, got {label!r} twice; {advice}.")
        arms[label] = ArmSpec(label, _source(label, value))
        _try(arms[label], strategy)
    return arms


def _label(value: object) -> str:
    simple = isinstance(value, (str, int, torch.dtype)) and not isinstance(value, bool)
    advice = "Give a plugin or arguments a label: `precisions={'fp32': 'fp32', 'mine': plugin}`."
    require(simple, "precisions", "names if it is a sequence", value, advice)
    return str(value)


def _source(label: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Precision):
        return value
    if isinstance(value, type) and issubclass(value, Precision):
        raise ValueError(f"`precisions[{label!r}]` must be a plugin, got the class {value.__name__}. Make one of it.")
    return {"precision": parse_precision(value, f"precisions[{label!r}]")}


def _try(arm: ArmSpec, strategy: Any) -> None:
    """Make the plugin and pickle the arm, so that a mistake raises an error before anything runs."""
    try:
        arm.plugin(strategy)
    except TypeError as error:
        text = str(error).replace("__init__() ", "").replace("AmpPrecision.", "")
        legal = ", ".join(f"`{name}`" for name in inspect.signature(AmpPrecision).parameters)
        raise ValueError(
            f"`precisions[{arm.label!r}]`: {text}. The arguments of `AmpPrecision` are {legal}."
        ) from error
    except ValueError as error:
        raise ValueError(f"`precisions[{arm.label!r}]`: {error}") from error
    try:
        pickle.dumps(arm)
    except Exception as error:
        text = f"`precisions[{arm.label!r}]` cannot be sent to another process: {type(error).__name__}: {error}."
        raise ValueError(f"{text} Pass the arguments of `AmpPrecision` as a dict.") from error
