"""The arguments of `find_fp32_modules`, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import final

from lightning_amp._arguments import is_number, require
from lightning_amp.casting import Choice, parse_precision
from lightning_amp.compare import check_trainer_names
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import device_of_trainer

_MEASURED = ("precision", "fp32_modules", "eval_precision", "upcast_parameters")
"""Arguments of `AmpPrecision` that say how a step computes."""


@final
class Request:
    """What is asked for.

    Args:
        precision: A name, or the arguments of `AmpPrecision`.
        tolerance: See `find_fp32_modules`.
        trainer_kwargs: See there.

    Attributes:
        name: Our name of the precision, settled.
        arguments: Of `AmpPrecision`, as far as they change what a step computes.
        device: Where to run.

    Raises:
        ValueError: Saying what is legal.

    """

    def __init__(self, precision: object, tolerance: object, trainer_kwargs: object) -> None:
        fine = is_number(tolerance) and tolerance > 0  # type: ignore[operator]
        require(fine, "tolerance", "a finite number above 0, such as 0.05", tolerance)
        self.tolerance = float(tolerance)  # type: ignore[arg-type]
        advice = "Pass it as `precision=`: a name, or the arguments of `AmpPrecision` as a dict."
        self.trainer_kwargs = check_trainer_names(trainer_kwargs, "what is searched for", advice)
        self.device = device_of_trainer(self.trainer_kwargs)
        given: dict[str, Any] = dict(precision) if isinstance(precision, Mapping) else {"precision": precision}
        try:
            plugin = AmpPrecision(**given)
        except TypeError as error:
            text = str(error).replace("__init__() ", "").replace("AmpPrecision.", "")
            raise ValueError(f"`precision`: {text}. It is a name, or the arguments of `AmpPrecision`.") from error
        self.arguments = {name: given[name] for name in _MEASURED if name in given}
        self.rules = plugin.fp32_modules
        name = parse_precision(given.get("precision", "auto"))
        self.name = Choice.pick(self.device)[0].name if name == "auto" else name
        self.arguments["precision"] = self.name
        picked = f" ('auto' picks {self.name!r} on this device)" if name == "auto" else ""
        if self.name == "fp32":
            raise ValueError(f"`precision` must be 'fp16' or 'bf16', got 'fp32', in which all modules are.{picked}")
        if self.name == "fp8":
            raise ValueError(
                "`precision` must be 'fp16' or 'bf16', got 'fp8'. Search in 'bf16', in which all else computes; what"
                " the casts to 8 bits lose per layer is in the table of `GradientMonitor`."
            )
        Choice.of(self.name).require(self.device)
