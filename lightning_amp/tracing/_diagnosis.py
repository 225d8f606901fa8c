"""Why a step overflowed, from the trace of its forward and backward."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import all_finite, count_nonfinite, largest_finite
from lightning_amp.tracing._operation import InFp32, Operation, blamed_in_fp32, operation
from lightning_amp.tracing._operation_calls import BackwardCall, OperationCall
from lightning_amp.tracing._operation_watch import OperationWatch
from lightning_amp.tracing._trace import Call, Trace, Where, floating_in, magnitudes

Cause = Literal["batch", "weights", "forward", "loss", "backward", "none"]


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where the first non-finite value of a step arose. Immutable.

    Attributes:
        cause: `"batch"`: the batch has non-finite values. `"weights"`: a parameter or buffer of the module has.
            `"forward"`: the output of the module overflowed, from finite inputs and weights. `"loss"`: all modules were
            fine, the loss was computed to something non-finite. `"backward"`: the loss was finite, only its scaled
            gradient overflowed. `"none"`: everything was finite.
        module: Qualified name of the module, the empty string for the outermost; `None` if there is none to name.
        module_class: Its class.
        where: In a forward: `"output"`, or `"input"` if what arrived at the module was not finite although every
            module before it was: an operation outside of any module overflowed. In a backward: `"parameter"`, the
            gradient of its parameter; `"input"`, what its backward computed for its input; `"output"`, what arrived
            from the loss or from operations outside of any module.
        parameter: In a backward its qualified name; with cause `"weights"` the parameter or buffer that is not finite.
        dtype: Of the first non-finite output or gradient, such as `"float16"`.
        shape: Of the same.
        largest_input: Largest finite magnitude of what went into the module.
        largest_weight: Largest finite magnitude of its own parameters.
        largest_gradient: Largest magnitude, scaled, of the gradients that are finite.
        entries: Cause `"batch"`: which parts of the batch have how many non-finite values.
        in_fp32: Whether the same step is finite in fp32; empty if it was not looked at. Two diagnoses that differ
            here, or in what follows, are equal.
        operation: Which operation, on which line; `None` if it was not looked at or not found.

    """

    cause: Cause
    module: str | None = None
    module_class: str | None = None
    where: Where | None = None
    parameter: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    largest_input: float | None = None
    largest_weight: float | None = None
    largest_gradient: float | None = None
    entries: tuple[tuple[str, int], ...] = ()
    in_fp32: InFp32 = field(default="", compare=False)
    operation: Operation | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


def diagnose(trace: Trace, loss: Tensor | None, batch: Any) -> Diagnosis:
    """Read a trace. Waits for the device.

    Args:
        trace: Of one forward, and of the backward of its scaled loss.
        loss: Before scaling, any shape; `None` if there was none.
        batch: What went in.

    """
    loss_is_bad = loss is not None and not all_finite([loss])
    arrival = trace.first_bad_arrival()
    if loss_is_bad or arrival is not None:
        call = trace.first_bad_call(overflowed=not loss_is_bad)
        if call is not None:
            return _forward(call, batch)
    if loss_is_bad:
        entries = nonfinite_entries(batch)
        assert loss is not None
        return Diagnosis(
            "batch" if entries else "loss", dtype=_name(loss.dtype), shape=tuple(loss.shape), entries=entries
        )
    if arrival is None:
        return Diagnosis("none")
    name, owner = trace.owners[arrival.parameter] if arrival.call is None else (arrival.call.name, arrival.call.module)
    return Diagnosis(
        "backward",
        module=name,
        module_class=type(owner).__name__,
        where=arrival.where,
        parameter=arrival.parameter or None,
        dtype=_name(arrival.dtype),
        shape=arrival.shape,
        largest_input=None if arrival.call is None else arrival.call.largest_input,
        largest_weight=_largest_weight(owner),
        largest_gradient=max(filter(math.isfinite, magnitudes(trace.arrivals)), default=None),
    )


def with_operation(module: nn.Module, found: Diagnosis, watch: OperationWatch) -> Diagnosis:
    """Add the operation to a diagnosis, as one run alone shows it."""
    culprit: OperationCall | BackwardCall | None = None
    if found.cause == "backward":
        culprit = watch.first_backward
    elif found.cause in ("forward", "loss"):
        culprit = blamed_in_fp32(watch.made_loss, watch.bad)
    return found if culprit is None else replace(found, operation=operation(module, culprit, None))


def nonfinite_entries(values: Any) -> tuple[tuple[str, int], ...]:
    """List path and count of what is not finite in nested containers: `(("['x']", 3),)`. Waits for the device."""
    counts = ((path, int(count_nonfinite(tensor))) for path, tensor in floating_in(values))
    return tuple((path, count) for path, count in counts if count)


def _forward(call: Call, batch: Any) -> Diagnosis:
    entries: tuple[tuple[str, int], ...] = ()
    cause: Cause = "forward"
    takes_nonfinite = call.takes_nonfinite
    parameter = next((n for n, p in _modules.plain_parameters(call.module).items() if count_nonfinite(p)), None)
    if parameter is not None:
        cause, parameter = "weights", f"{call.name}.{parameter}" if call.name else parameter
    elif takes_nonfinite:
        entries = nonfinite_entries(batch)
        cause = "batch" if entries else "forward"
    dtype, shape = next(iter(call.outputs), (None, None))
    return Diagnosis(
        cause,
        module=call.name,
        module_class=type(call.module).__name__,
        where="input" if cause == "forward" and takes_nonfinite else "output",
        parameter=parameter,
        dtype=None if dtype is None else _name(dtype),
        shape=shape,
        largest_input=call.largest_input,
        largest_weight=_largest_weight(call.module),
        entries=entries,
    )


def _largest_weight(module: nn.Module) -> float | None:
    own = [largest_finite(p) for p in module.parameters(recurse=False)]
    return max((float(value) for value in own), default=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
