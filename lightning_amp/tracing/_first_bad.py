"""Find where the first bad value of a step began, from the trace of one run, or of two runs of the same step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from lightning_amp._containers import tensors_in
from lightning_amp.findings import Op
from lightning_amp.numerics import FP16_LARGEST, dense
from lightning_amp.tracing._operations import CASTS, SUMMING, plain
from lightning_amp.tracing._trace import FUNCTION, Call, Gradient, Trace


def bad_entries(batch: Any) -> tuple[tuple[str, int, int, tuple[int, ...], str], ...]:
    """List the bad tensors in a batch, with path, counts, first index and kind. This waits for the device."""
    found: list[tuple[str, int, int, tuple[int, ...], str]] = []
    for path, tensor in tensors_in(batch):
        with suppress(Exception):  # a quantized tensor cannot be asked
            values = dense(tensor.detach())
            bad = ~torch.isfinite(values)
            if count := int(bad.sum()):
                first = tuple(bad.nonzero()[0].tolist()) if values.shape == tensor.shape else ()
                kind = "NaN" if bool(torch.isnan(values).any()) else "infinity"
                found.append((path, count, values.numel(), first, kind))
    return tuple(found)


def first_bad(run: Trace) -> Call | Gradient | None:
    """Find the operation where the bad values of one run began; a backward if the loss is finite.

    If the code wrote an infinity on purpose, it is the operation that turned it into NaN.
    """
    if run.bad_loss is None:
        gradient = next((one for one in run.gradients if one.bad), None)
        # the result of an operation may not show in the loss
        return gradient.call if gradient is not None and gradient.call.makes_fault else gradient
    chain = _to_the_loss(run)
    masked = next((call for call in chain if call.kind == "masked" and call.made.bad), None)
    fault = next((call for call in chain if call.makes_fault), None)
    outside = next((call for call in chain if call.takes_from_outside and not call.is_collective), None)
    is_mask = fault in (None, masked) or (fault.made.bad <= {"-inf"} and plain(fault.key.name) != "div")
    if masked is not None and is_mask:
        return masked
    if outside is None or (fault is not None and fault.number < outside.number):
        return fault or next(iter(chain), None)
    return outside


def first_difference(run: Trace, fp32_run: Trace) -> Call | None:
    """Find the first operation of the forward whose result is bad in one run and not in the other.

    A minus infinity counts unless it is there in fp32 too: then it is a mask. If the result is bad because an argument
    is 0, this may be a quotient by an infinity: then it is the operation that made the infinity.
    """

    def is_lost(call: Call) -> bool:
        in_fp32, is_fine = fp32_run.by_key.get(call.key), run.bad_loss is None or call.kind == "literal"
        return not (is_fine if in_fp32 is None else call.made.bad <= in_fp32.made.bad)

    found = next(filter(is_lost, _to_the_loss(run)), None)
    calls = [found] if found is not None and found.kind == "zero" else []
    for one in calls:  # grows meanwhile
        calls += [taken.maker for taken in one.taken if taken.maker is not None and taken.maker not in calls]
        if one is not found and one.made.bad and (behind := next(filter(is_lost, _chain(one)), None)) is not None:
            return behind
    return found


def _to_the_loss(run: Trace) -> list[Call]:
    """Return the operations through which bad values reached the loss, in order; all bad ones if that is unknown."""
    last = None if run.bad_loss is None else run.bad_loss.source
    if last is None:
        return [call for call in run.calls if call.made.bad and not call.after_backward]
    return _chain(last)


def _chain(last: Call) -> list[Call]:
    """Return the operations through which bad values reached the result of an operation, in order."""
    found, queue = {last.number: last}, [last]
    while queue:
        for source in queue.pop().sources:
            if source.number not in found:
                found[source.number] = source
                queue.append(source)
    return [found[number] for number in sorted(found)]


def has_fault(run: Trace) -> bool:
    """Return whether an operation of the forward made NaN or infinity, even if that does not show in the loss."""
    return run.bad_loss is not None or any(call.makes_fault for call in _to_the_loss(run))


def is_received(found: Call | Gradient, run: Trace) -> bool:
    """Return whether the first bad values came from another rank, by a collective operation."""
    if isinstance(found, Call):
        return found.is_collective and not found.sources
    inside = [call for call in run.calls if call.in_backward and call.made.bad and not call.sources][:1]
    return not found.arrived.bad and any(call.is_collective for call in (found.call, *inside))


def maker_module(call: Call) -> str | None:
    """Name the module that makes the value: the module of the operation, or of the nearest one before it."""
    calls = [call]
    for one in calls:  # grows meanwhile
        if one.module:
            return one.module
        calls += [taken.maker for taken in one.taken if taken.maker is not None and taken.maker not in calls]
    return None


def taking_modules(call: Call, run: Trace) -> list[str]:
    """Name the modules that compute with the bad result of an operation, in order."""
    reached, names = {call.number}, list[str]()
    for later in run.calls[call.number + 1 :]:
        if reached & {source.number for source in later.sources}:
            reached.add(later.number)
            names += [later.module] if later.module else []
    return list(dict.fromkeys(names))


def described(found: Call | Gradient, run: Trace, fp32_run: Trace | None = None) -> Op:
    """Describe an operation of `run`, or its backward."""
    call = found if isinstance(found, Call) else found.call
    in_fp32 = None if fp32_run is None else fp32_run.by_key.get(call.key)
    place = call.key.place
    where: tuple[str, int, str] = ("", 0, "") if place is None else (place.file, place.line, place.code)
    bad = found.made.bad if isinstance(found, Call) else found.arrived.bad or found.computed.bad
    op = Op(
        call.key.name,
        *where,
        module=call.module,
        dtype="" if found.dtype is None else str(found.dtype).removeprefix("torch."),
        shape=found.shape,
        result="nan" if "nan" in bad else "inf" if "inf" in bad else "-inf" if bad else "",
        largest_input=call.largest_input if isinstance(found, Call) else found.arrived.largest,
        largest_in_fp32=None if in_fp32 is None or in_fp32.made.bad else in_fp32.made.largest,
        kind="function" if call.known_as == FUNCTION else call.kind,
        kind_in_fp32="" if in_fp32 is None else in_fp32.kind,
        count=call.count,
        is_summed=any(one.key.name in SUMMING and any(t.maker is call for t in one.taken) for one in run.calls),
    )
    if isinstance(found, Call):
        return op
    inside = next((one for one in run.calls if one.in_backward and one.made.bad and not one.takes_bad), None)
    if op.kind == "function" and inside is not None and (inner := inside.key.place) is not None:
        op = replace(op, file=inner.file, line=inner.line, code=inner.code)  # in the backward of the function
    in_fp16 = any(one.call is call and one.dtype is torch.float16 for one in run.gradients)
    if in_fp16 and op.name.startswith(("gru", "lstm", "rnn")) and (call.largest_input or 0.0) > FP16_LARGEST:
        # gates hide the infinity in the forward
        op = replace(op, dtype="float16", kind="cast", largest_input=call.largest_input)
    kind = "" if op.name in CASTS or op.kind == "sum" else op.kind
    return replace(op, in_backward=True, is_sum=bool(found.arrived.bad), kind=kind)
