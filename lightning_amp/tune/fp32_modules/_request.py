"""Check the arguments of `find_fp32_modules` before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp._arguments import is_number, require
from lightning_amp.casting import Choice, parse_precision
from lightning_amp.compare import check_trainer_names
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import device_of_trainer

_MEASURED = ("precision", "fp32_modules", "eval_precision", "upcast_parameters")
"""Arguments of `AmpPrecision` that change the values of a step."""


@final
class Request:
    """The checked arguments of `find_fp32_modules`. The `ValueError` of a wrong argument says which values are legal.

    Attributes:
        name: `"fp16"` or `"bf16"`.
        arguments: The arguments of `AmpPrecision` that change the values of a step.
        rules: The user's own `fp32_modules`.
        device: Where the search runs.

    """

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        make_data: Callable[[], LightningDataModule],
        precision: object,
        tolerance: Any,
        trainer_kwargs: object,
    ) -> None:
        for argument, factory in (("make_module", make_module), ("make_data", make_data)):
            if isinstance(factory, (LightningModule, LightningDataModule)) or not callable(factory):
                raise ValueError(
                    f"`{argument}` must be a class or a function without arguments, got an object of"
                    f" {type(factory).__name__}. Write `lambda: ...` around it."
                )
        fine = is_number(tolerance) and tolerance > 0
        require(fine, "tolerance", "a finite number above 0, such as 0.05", tolerance)
        advice = "Pass it as `precision=`: a name, or the arguments of `AmpPrecision` as a dict."
        kwargs = check_trainer_names(trainer_kwargs, "what is searched for", advice)
        given: dict[str, Any] = dict(precision) if isinstance(precision, Mapping) else {"precision": precision}
        self.make_module, self.make_data, self.trainer_kwargs = make_module, make_data, kwargs
        self.rules = _plugin(given).fp32_modules
        self.device = device_of_trainer(kwargs)
        self.name = _low_precision(given.get("precision", "auto"), self.device)
        self.arguments = {**{key: given[key] for key in _MEASURED if key in given}, "precision": self.name}
        self.tolerance = float(tolerance)


def _plugin(arguments: Mapping[str, Any]) -> AmpPrecision:
    try:
        return AmpPrecision(**arguments)
    except TypeError as error:
        text = str(error).replace("__init__() ", "").replace("AmpPrecision.", "")
        raise ValueError(f"`precision`: {text}. It is a name, or the arguments of `AmpPrecision`.") from error


def _low_precision(given: Any, device: torch.device) -> str:
    """Return `"fp16"` or `"bf16"`; refuse a precision that needs no search."""
    name = parse_precision(given)
    picked = ""
    if name == "auto":
        name = Choice.pick(device)[0].name
        picked = f" ('auto' picks {name!r} on this device)"
    if name == "fp32":
        raise ValueError(f"`precision` must be 'fp16' or 'bf16', got 'fp32': all modules are in fp32 already.{picked}")
    if name == "fp8":
        raise ValueError(
            "`precision` must be 'fp16' or 'bf16', got 'fp8'. Search in 'bf16', in which all other operations compute."
            " The table of `GradientMonitor` shows the error of the casts to 8 bits in each layer."
        )
    Choice.of(name).require(device)
    return name
