"""Name the module and the operation in which a step overflowed, from one or two watched runs of the step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._compat import _modules
from lightning_amp.findings import Diagnosis, Operation
from lightning_amp.numerics import all_finite, count_nonfinite, largest_finite
from lightning_amp.tracing._operation_calls import FUNCTION, BackwardCall, OperationCall
from lightning_amp.tracing._operation_watch import OperationWatch
from lightning_amp.tracing._operations import SUMMING
from lightning_amp.tracing._trace import Call, Trace, floating_in, magnitudes

# -- the module --------------------------------------------------------------------------------------------------------


def diagnose(trace: Trace, loss: Tensor | None, batch: Any) -> Diagnosis:
    """Find the module where the first non-finite value appeared. This waits for the device.

    Args:
        trace: The trace of one forward, and of the backward of its scaled loss.
        loss: The unscaled loss, any shape; `None` if the step had none.
        batch: The batch of the step.

    """
    loss_is_bad = loss is not None and not all_finite([loss])
    arrival = trace.first_bad_arrival()
    if loss_is_bad or arrival is not None:
        call = trace.first_bad_call(overflowed=not loss_is_bad)
        if call is not None:
            return _in_forward(call, batch, trace.bad_parameters)
    if loss_is_bad:
        assert loss is not None
        entries = nonfinite_entries(batch)
        cause, dtype = "batch" if entries else "loss", _name(loss.dtype)
        return Diagnosis(cause, dtype=dtype, shape=tuple(loss.shape), entries=entries)
    if arrival is None:
        return Diagnosis("none")
    place, call = arrival.place, arrival.call
    name, owner = trace.owners[place.parameter] if call is None else (call.name, call.module)
    return Diagnosis(
        "backward",
        module=name,
        module_class=type(owner).__name__,
        where=place.where,
        parameter=place.parameter or None,
        dtype=_name(arrival.dtype),
        shape=arrival.shape,
        largest_input=None if call is None else call.largest_input,
        largest_weight=_largest_weight(owner),
        largest_gradient=max(filter(math.isfinite, magnitudes(trace.arrivals)), default=None),
    )


def _in_forward(call: Call, batch: Any, bad_parameters: Collection[str] | None) -> Diagnosis:
    cause, entries, takes_nonfinite = "forward", (), call.takes_nonfinite
    prefix = f"{call.name}." if call.name else ""
    own = {f"{prefix}{name}": parameter for name, parameter in _modules.plain_parameters(call.module).items()}
    known = bad_parameters
    parameter = next((n for n, p in own.items() if (count_nonfinite(p) if known is None else n in known)), None)
    if parameter is not None:
        cause = "weights"
    elif takes_nonfinite and (entries := nonfinite_entries(batch)):
        cause = "batch"
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


def nonfinite_entries(values: Any) -> tuple[tuple[str, int], ...]:
    """List path and number of non-finite values in nested containers: `(("['x']", 3),)`. This waits for the device."""
    counts = ((path, int(count_nonfinite(tensor))) for path, tensor in floating_in(values))
    return tuple((path, count) for path, count in counts if count)


def _largest_weight(module: nn.Module) -> float | None:
    return max((float(largest_finite(p)) for p in module.parameters(recurse=False)), default=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the operation -----------------------------------------------------------------------------------------------------


def blamed_in_half(half: OperationWatch, fp32: OperationWatch, made_loss: OperationCall | None) -> OperationCall | None:
    """Find the first operation that lost values which fp32 keeps finite.

    A result that is not finite in fp32 either, although the fp32 loss is finite, is a mask and is not blamed.

    Args:
        half: The watch of the step as it ran.
        fp32: The watch of the same step in fp32, which measured the operations that were not finite in `half`.
        made_loss: The operation that made the non-finite loss; `None` blames the first non-finite operation.

    """
    for call in half.bad if made_loss is None else made_loss.chain:
        if call.facts.kind == "literal" and not call.makes_nan:
            continue
        in_fp32 = fp32.measured.get(call.key)
        if in_fp32 is None or in_fp32.num_nonfinite < call.num_nonfinite:
            return call
    return None


def blamed_in_fp32(made_loss: OperationCall | None, bad: Iterable[OperationCall]) -> OperationCall | None:
    """Find the operation to blame for a loss that is not finite in any precision.

    If the code wrote an infinity somewhere on purpose, blame the operation that turned it into NaN.

    Args:
        made_loss: The operation that made the non-finite loss, if it is known.
        bad: All operations with non-finite results, to choose from if it is not.

    """
    if made_loss is None:
        return next((call for call in bad if not call.takes_nonfinite and call.facts.kind != "literal"), None)
    masked = next((call for call in made_loss.chain if call.facts.kind == "masked"), None)
    if masked is not None:
        return masked
    root = made_loss.roots[0]
    if root.facts.kind != "literal" or root.makes_nan:
        return root
    return next((call for call in made_loss.chain if call.makes_nan and call.number > root.number), root)


def operation(
    module: nn.Module,
    found: OperationCall | BackwardCall,
    in_fp32: OperationCall | None = None,
    bad: Iterable[OperationCall] = (),
) -> Operation:
    """Describe an operation, or its backward.

    Args:
        module: The outermost module; the module whose submodules give the names of classes.
        found: The operation, from the step as it ran; from the fp32 run if it is not finite there either.
        in_fp32: The same operation in fp32, if it was measured.
        bad: All operations of the same run with non-finite results.

    """
    in_backward = isinstance(found, BackwardCall)
    call = found.call if in_backward else found
    classes = {_modules.plain_name(name): type(m).__name__ for name, m in module.named_modules()}
    kind, kind_in_fp32 = str(call.facts.kind), "" if in_fp32 is None else str(in_fp32.facts.kind)
    if in_backward:
        kind = "function" if call.known_as == FUNCTION else "zero" if _is_zero(call.smallest) else ""
        if in_fp32 is not None and _is_zero(in_fp32.smallest):
            kind_in_fp32 = "zero"
    takers = [other.name for other in bad if any(source is call for source in other.sources)]
    place = call.key.place
    return Operation(
        call.name,
        file="" if place is None else place.file,
        line=0 if place is None else place.line,
        code="" if place is None else place.code,
        module=call.module,
        module_class=None if call.module is None else classes.get(call.module),
        in_backward=in_backward,
        is_sum=in_backward and found.is_sum,
        dtype=None if found.dtype is None else _name(found.dtype),
        shape=found.shape,
        largest_input=found.largest if in_backward else found.largest_input,
        largest_in_fp32=None if in_fp32 is None or in_fp32.num_nonfinite else in_fp32.largest_output,
        kind=kind,
        kind_in_fp32=kind_in_fp32,
        index=call.facts.index,
        count=call.facts.count,
        followed_by=next((name for name in takers if name in SUMMING), next(iter(takers), "")),
    )


def _is_zero(smallest: Tensor | None) -> bool:
    return smallest is not None and float(smallest) == 0
