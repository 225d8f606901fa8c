"""Find where the first bad value of a step began, from the trace of one run, or of two runs of the same step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lightning_amp.findings import Op
from lightning_amp.numerics import count_nonfinite, dense
from lightning_amp.tracing._operations import CASTS, SUMMING
from lightning_amp.tracing._trace import FUNCTION, Call, Gradient, Taken, Trace, floating_in


def bad_entries(batch: Any) -> tuple[tuple[str, int, int, tuple[int, ...], str], ...]:
    """List the bad parts of a batch, with path, counts, first index and kind. This waits for the device."""
    found: list[tuple[str, int, int, tuple[int, ...], str]] = []
    for path, tensor in floating_in(batch):
        count = int(count_nonfinite(tensor))
        if count:
            is_dense = tensor.layout is torch.strided and not tensor.is_nested
            first = tuple((~torch.isfinite(tensor)).nonzero()[0].tolist()) if is_dense else ()
            kind = "NaN" if bool(torch.isnan(dense(tensor)).any()) else "infinity"
            found.append((path, count, tensor.numel(), first, kind))
    return tuple(found)


def bad_loss(run: Trace) -> Taken | None:
    """Return the first loss that is not finite."""
    return next((loss for loss in run.losses if loss.ends.bad), None)


def first_bad(run: Trace) -> Call | Gradient | None:
    """Find the operation where the bad values of one run began; a backward if the loss is finite.

    If the code wrote an infinity on purpose, it is the operation that turned it into NaN.
    """
    if bad_loss(run) is None:
        gradient = next((one for one in run.gradients if one.bad), None)
        if gradient is not None and gradient.call.makes_fault:  # its result does not show in the loss
            return gradient.call
        return gradient
    chain = _to_the_loss(run)
    masked = next((call for call in chain if call.kind == "masked" and call.made.bad), None)
    fault = next((call for call in chain if call.makes_fault), None)
    outside = next((call for call in chain if call.takes_from_outside and not call.is_collective), None)
    if masked is not None or outside is None or (fault is not None and fault.number < outside.number):
        return masked or fault or next(iter(chain), None)
    return outside


def first_difference(run: Trace, fp32_run: Trace) -> Call | Gradient | None:
    """Find the first operation whose result is bad in one run and not in the other; a backward if there is none.

    A minus infinity counts unless it is there in fp32 too: then it is a mask.
    """
    chain = _to_the_loss(run) if bad_loss(run) is not None else _forward(run)
    for call in chain:
        in_fp32 = fp32_run.by_key.get(call.key)
        if call.has_lost(in_fp32) and (bad_loss(run) is not None or in_fp32 is not None):
            return call
    return next((one for one in run.gradients if one.bad), None) if bad_loss(run) is None else None


def _forward(run: Trace) -> list[Call]:
    return [call for call in run.calls if call.made.bad and not call.in_backward and not call.is_of_gradients]


def _to_the_loss(run: Trace) -> list[Call]:
    """Return the operations through which bad values reached the loss, in order; all bad ones if that is unknown."""
    loss = bad_loss(run)
    last = None if loss is None else loss.source
    if last is None:
        return _forward(run)
    found, queue = {last.number: last}, [last]
    while queue:
        for source in queue.pop().sources:
            if source.number not in found:
                found[source.number] = source
                queue.append(source)
    return [found[number] for number in sorted(found)]


def is_received(found: Call | Gradient | None, run: Trace) -> bool:
    """Return whether the first bad values came from another rank, by a collective operation."""
    if isinstance(found, Call):
        return found.is_collective and not found.sources
    if found is None or found.arrived.bad:
        return False
    inside = [call for call in run.calls if call.in_backward and call.made.bad and not call.sources][:1]
    return any(call.is_collective for call in (found.call, *inside))


def position(found: Call | Gradient | None) -> float:
    """Return the place of a fault in the order of operations: the backward follows the forward, in reverse."""
    if found is None:
        return torch.inf
    return found.number if isinstance(found, Call) else 1e9 - found.call.number


def makers(call: Call) -> Iterator[Call]:
    """Iterate over the operations from whose results this one was computed, the nearest first."""
    seen, queue = {call.number}, [one.maker for one in call.taken]
    while queue:
        maker = queue.pop(0)
        if maker is not None and maker.number not in seen:
            seen.add(maker.number)
            yield maker
            queue += [one.maker for one in maker.taken]


def maker_module(call: Call) -> str | None:
    """Name the module that makes the value: the module of the operation, or of the nearest one before it."""
    return next((one.module for one in (call, *makers(call)) if one.module), None)


def taking_modules(call: Call, run: Trace) -> list[str]:
    """Name the modules that compute with the bad result of an operation, in order."""
    reached, names = {call.number}, list[str]()
    for later in run.calls[call.number + 1 :]:
        if reached & {source.number for source in later.sources}:
            reached.add(later.number)
            names += [later.module] if later.module else []
    return list(dict.fromkeys(names))


def has_fault(run: Trace) -> bool:
    """Return whether an operation of the forward made NaN or infinity, even if that does not show in the loss."""
    return bad_loss(run) is not None or any(call.makes_fault for call in _forward(run))


def described(found: Call | Gradient, run: Trace, fp32_run: Trace | None = None) -> Op:
    """Describe an operation of `run`, or its backward."""
    call = found if isinstance(found, Call) else found.call
    in_fp32 = None if fp32_run is None else fp32_run.by_key.get(call.key)
    place = call.key.place
    bad = found.made.bad if isinstance(found, Call) else found.arrived.bad or found.computed.bad
    op = Op(
        call.key.name,
        file="" if place is None else place.file,
        line=0 if place is None else place.line,
        code="" if place is None else place.code,
        module=call.module,
        dtype="" if found.dtype is None else str(found.dtype).removeprefix("torch."),
        shape=found.shape,
        result="nan" if "nan" in bad else "inf" if "inf" in bad else "-inf" if bad else "",
        largest_input=call.largest_input if isinstance(found, Call) else found.arrived.largest,
        largest_in_fp32=None if in_fp32 is None or in_fp32.made.bad else in_fp32.made.largest,
        kind="function" if call.known_as == FUNCTION else call.kind,
        kind_in_fp32="" if in_fp32 is None else in_fp32.kind,
        count=call.count,
        followed_by=_taker(call, run.calls),
    )
    if isinstance(found, Call):
        return op
    inside = next((one for one in run.calls if one.in_backward and one.made.bad and not one.takes_bad), None)
    if op.kind == "function" and inside is not None and (inner := inside.key.place) is not None:
        op = replace(op, file=inner.file, line=inner.line, code=inner.code)  # in the backward of the function
    kind = "" if op.name in CASTS or op.kind == "sum" else op.kind
    return replace(op, in_backward=True, is_sum=bool(found.arrived.bad), kind=kind)


def _taker(call: Call, calls: Iterable[Call]) -> str:
    names = [one.key.name for one in calls if any(taken.maker is call for taken in one.taken)]
    return next((name for name in names if name in SUMMING), next(iter(names), ""))
