"""Name the operation to blame for a step that is not finite, by comparing the step as it was with its run in fp32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import count_nonfinite
from lightning_amp.tracing import (
    BackwardCall,
    Diagnosis,
    OperationCall,
    OperationWatch,
    blamed_in_fp32,
    blamed_in_half,
    nonfinite_entries,
    operation,
)


@final
class Blame(NamedTuple):
    """A diagnosis, and the operation of the replay that it names."""

    diagnosis: Diagnosis
    call: OperationCall | None
    is_swallowed: bool = False  # the result does not show in the loss, which is finite: `1 / (1 + inf)` is 0


def key_without_fp32(found: Diagnosis, watch: OperationWatch) -> str:
    """Return a key for the cause, before the run in fp32. It is the same for all batches that show this cause."""
    call: OperationCall | None = None
    if found.cause == "backward":
        call = None if watch.first_backward is None else watch.first_backward.call
    elif found.cause in ("forward", "loss"):
        bad = watch.bad if watch.made_loss is None else watch.made_loss.roots
        call = next(iter(bad), None)
    if call is None:
        return f"{found.cause}: {found.module}, {found.parameter or ''}"
    place = call.key.place
    return f"{call.key.name}, {place.file}:{place.line}" if place is not None else f"{call.key.name}, {call.module}"


def key_with_fp32(found: Diagnosis, before: str) -> str:
    """Return the key for a diagnosis that the run in fp32 has corrected; `before` is the key without it."""
    operation = found.operation
    if found.cause in ("batch", "weights"):
        return f"{found.cause}: {found.module}, {found.parameter}"
    return (
        f"{operation.name}, {operation.file}:{operation.line}" if operation is not None and operation.file else before
    )


def blame(
    module: nn.Module,
    found: Diagnosis,
    amp_watch: OperationWatch,
    found_in_fp32: Diagnosis,
    fp32_watch: OperationWatch,
    batch: Any,
    bad_parameters: Collection[str] | None = None,
) -> Blame:
    """Correct a diagnosis by the run of the same step in fp32, and do not blame an intended mask.

    `bad_parameters` has the parameters of a sharded module that are not finite on any rank.
    """
    if found_in_fp32.cause == "none":
        return _lost_in_half(module, found, amp_watch, fp32_watch)
    found = replace(found, in_fp32="not finite")
    if found_in_fp32.cause == "backward":
        return _backward_in_fp32(module, found, found_in_fp32, fp32_watch)
    call = blamed_in_fp32(fp32_watch.made_loss, fp32_watch.bad)
    if call is None:
        return Blame(found, None)
    if call.takes_nonfinite and not call.sources:
        outside = _from_outside(module, found, call, batch, bad_parameters)
        if outside.cause in ("batch", "weights"):
            return Blame(outside, None)
        named = _named(module, outside, call, fp32_watch, amp_watch)
        assert named.diagnosis.operation is not None
        operation_there = replace(named.diagnosis.operation, kind="outside")
        return Blame(replace(named.diagnosis, operation=operation_there), None)
    if call.facts.kind == "masked" or not call.takes_nonfinite or found.cause not in ("batch", "weights"):
        cause = "forward" if call.module else "loss"
        kept = found.cause if found.cause in ("forward", "loss") else cause
        as_it_was = next((c for c in amp_watch.bad if c.key == call.key and c.facts.kind == call.facts.kind), call)
        return _named(module, replace(found, cause=kept, parameter=None, entries=()), as_it_was, fp32_watch, amp_watch)
    return Blame(found, None)


def blame_without_fp32(module: nn.Module, found: Diagnosis, amp_watch: OperationWatch) -> Blame:
    """Name the operation without a run in fp32."""
    if found.cause == "backward":
        culprit = amp_watch.first_backward
        return Blame(found, None) if culprit is None else _named(module, found, culprit, amp_watch)
    call = blamed_in_fp32(amp_watch.made_loss, amp_watch.bad) if found.cause in ("forward", "loss") else None
    return Blame(found, None) if call is None or call.takes_nonfinite else _named(module, found, call, amp_watch)


def _lost_in_half(module: nn.Module, found: Diagnosis, amp_watch: OperationWatch, fp32_watch: OperationWatch) -> Blame:
    found = replace(found, in_fp32="finite")
    if found.cause == "backward":
        hidden = blamed_in_half(amp_watch, fp32_watch, None)
        if hidden is not None and hidden.makes_nan:
            named = _named(module, replace(found, cause="forward", parameter=None), hidden, fp32_watch, amp_watch)
            return named._replace(is_swallowed=True)
        culprit = amp_watch.first_backward
        return Blame(found, None) if culprit is None else _named(module, found, culprit, fp32_watch, amp_watch)
    call = blamed_in_half(amp_watch, fp32_watch, amp_watch.made_loss)
    if call is None:
        return Blame(found, None)
    if found.cause in ("batch", "weights"):  # fp32 is finite with these values: they were not the cause
        found = replace(found, cause="forward" if call.module else "loss", parameter=None, entries=())
    return _named(module, found, call, fp32_watch, amp_watch)


def _backward_in_fp32(
    module: nn.Module, found: Diagnosis, found_in_fp32: Diagnosis, fp32_watch: OperationWatch
) -> Blame:
    inside = next((call for call in fp32_watch.bad_in_backward if not call.takes_nonfinite), None)
    if found.cause != "backward":  # report the fault in fp32, because it also remains in every other precision
        found = replace(found_in_fp32, in_fp32="not finite")
    culprit = fp32_watch.first_backward
    if culprit is None:
        return Blame(found, None)
    call = culprit.call
    if call.num_nonfinite and not call.takes_nonfinite:  # its result is not finite, but does not show in the loss
        cause = "forward" if call.module else "loss"
        return _named(module, replace(found, cause=cause, parameter=None), call, fp32_watch)
    named = _named(module, found, culprit, fp32_watch)
    if named.diagnosis.operation is not None and named.diagnosis.operation.kind == "function" and inside is not None:
        line = operation(module, inside)  # in the user's code of the function's backward
        return named._replace(
            diagnosis=replace(
                named.diagnosis,
                operation=replace(named.diagnosis.operation, file=line.file, line=line.line, code=line.code),
            )
        )
    return named


def _from_outside(
    module: nn.Module, found: Diagnosis, call: OperationCall, batch: Any, bad_parameters: Collection[str] | None
) -> Diagnosis:
    """Find the parameter, buffer or part of the batch that was not finite before any operation."""
    owner = call.module or found.module
    classes = {_modules.plain_name(name): type(m).__name__ for name, m in module.named_modules()}
    states = [*(module.named_parameters() if bad_parameters is None else ()), *module.named_buffers()]
    bad = [*(bad_parameters or ()), *(_modules.plain_name(name) for name, value in states if _is_bad(value))]
    near = [name for name in bad if owner and name.startswith(f"{owner}.")]
    entries = nonfinite_entries(batch)
    if near or (bad and not entries):
        name = (near or bad)[0]
        return replace(
            found, cause="weights", parameter=name, module=owner, module_class=classes.get(owner or ""), entries=()
        )
    if entries:
        return replace(
            found, cause="batch", entries=entries, parameter=None, module=owner or None,
            module_class=classes.get(owner) if owner else None,
        )  # fmt: skip
    return found


def _is_bad(value: Any) -> bool:
    return bool((value.is_floating_point() or value.is_complex()) and count_nonfinite(value))


def _named(
    module: nn.Module,
    found: Diagnosis,
    culprit: OperationCall | BackwardCall,
    fp32_watch: OperationWatch,
    amp_watch: OperationWatch | None = None,
) -> Blame:
    call = culprit if isinstance(culprit, OperationCall) else culprit.call
    bad = [*fp32_watch.bad, *(amp_watch.bad if amp_watch is not None else ())]
    named = operation(module, culprit, fp32_watch.measured.get(call.key), bad)
    if found.cause in ("forward", "loss") and call.module is not None:
        cause = found.cause if call.module == "" else "forward"
        is_loss = cause == "loss"
        found = replace(
            found,
            cause=cause,
            module=None if is_loss else call.module,
            module_class=None if is_loss else named.module_class,
            where=None if is_loss else "output",
            dtype=named.dtype,
            shape=named.shape,
            largest_input=named.largest_input,
        )
    return Blame(replace(found, operation=named), call)
