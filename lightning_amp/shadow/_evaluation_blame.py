"""From the outputs of modules and operations in two precisions: which of them is the first that is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import count_nonfinite, fidelity
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.tracing import COMPARISONS_WITH_TARGETS, OperationCall, OperationWatch, nonfinite_entries, plain

WRONG_DB = 20.0
"""Below it an output is wrong: its error is more than a tenth of it, or of what differs between the samples."""
_LOST_DB = 6.0
"""How much worse than its inputs the output of a culprit is at least."""


@final
@dataclass(frozen=True, slots=True)
class Blame:
    """What is wrong first; fields as of `EvaluationReport`."""

    cause: Literal["batch", "weights", "module", "operation", "unknown"] = "unknown"
    in_fp32_too: bool = False
    names: tuple[str, ...] = ()
    module: str | None = None
    module_class: str = ""
    input_db: float = math.inf
    output_db: float = math.nan
    operation: str = ""
    place: str = ""
    source: str | None = None
    """The module whose output goes into the operation."""
    only_varying: bool = False
    """Only what differs between the samples is wrong."""


def blamed_module(outputs: OutputComparison, *, nonfinite: bool) -> Blame:
    """Find the first module, innermost first, whose output is wrong although its input is not. Waits for the device.

    The module that was run itself, without a name, is not one of them: that is the step.

    Args:
        outputs: In AMP beside those in fp32.
        nonfinite: Only not being finite is wrong.

    """
    wrong: Blame | None = None
    for call, reference in outputs.calls:
        if not call.name:
            continue
        if _bad(call.outputs):
            if not _bad(call.inputs) and not _bad(reference.outputs):
                return Blame("module", module=call.name, module_class=call.kind, input_db=worst_db(call.input_sums))
        elif wrong is None and not nonfinite:
            before, after = worst_db(call.input_sums), worst_db(call.sums)
            if after < WRONG_DB and before > after + _LOST_DB:
                wrong = Blame(
                    "module",
                    module=call.name,
                    module_class=call.kind,
                    input_db=before,
                    output_db=after,
                    only_varying=plain_db(call.sums) >= WRONG_DB,
                )
    return wrong or Blame()


def origin_in_fp32(outputs: OutputComparison, batch: object, module: nn.Module) -> Blame:
    """Tell why a metric is not finite in fp32 either: the batch, a weight or buffer, or a module."""
    entries = tuple(f"{count} in `batch{path}`" for path, count in nonfinite_entries(batch))
    first = next((call for call in outputs.reference if _bad(call.outputs)), None)
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    named = {_modules.plain_name(name): tensor for name, tensor in named.items() if tensor.is_floating_point()}
    reached = (first.name, first.kind) if first is not None else (None, "")
    if first is not None and not _bad(first.inputs):
        own = [name for name in named if name.rpartition(".")[0] == first.name and int(count_nonfinite(named[name]))]
        if own:
            return Blame("weights", True, tuple(own), *reached)
        if first.name:
            return Blame("module", True, module=first.name, module_class=first.kind)
        return Blame("operation", True)
    if entries:
        return Blame("batch", True, entries, *reached)
    spoilt = tuple(name for name, tensor in named.items() if int(count_nonfinite(tensor)))
    return Blame("weights", True, spoilt) if spoilt else Blame("operation", True)


def blamed_operation(operations: OperationWatch, blame: Blame, *, nonfinite: bool) -> Blame:
    """Add the operation and the user's line; where no module is to blame, see whether one outside of modules is.

    Args:
        operations: In AMP beside those in fp32; those in fp32 where the blame is that of fp32.
        blame: Of a module, if one is to blame.
        nonfinite: Only not being finite is wrong.

    """
    outside = blame.cause in ("unknown", "operation")
    for call in operations.calls:
        if outside and call.module is not None:
            continue
        if not outside and call.module != blame.module and not str(call.module).startswith(f"{blame.module}."):
            continue
        beside = call.beside
        assert beside is not None
        before = min((_worst_db_of(source) for source in call.makers), default=math.inf)
        after = worst_db(beside.sums)
        if beside.is_bad:
            there = beside.reference
            fine_in_fp32 = there is not None and there.beside is not None and not there.beside.is_bad
            guilty = not beside.takes_bad and (blame.in_fp32_too or fine_in_fp32)
            after = math.nan
        else:
            guilty = (
                not nonfinite
                and not beside.is_blameless
                and after < WRONG_DB
                and before > after + _LOST_DB
                and not (beside.takes_exact and plain(call.name) in COMPARISONS_WITH_TARGETS)
            )
        if guilty:
            place = "" if call.key.place is None else str(call.key.place)
            found = replace(blame, operation=_plain(beside.written), place=place)
            if not outside:
                return found
            only_varying = plain_db(beside.sums) >= WRONG_DB
            return replace(
                found,
                cause="operation",
                input_db=before,
                output_db=after,
                source=_source(call),
                only_varying=only_varying,
            )
    return blame


def _worst_db_of(call: OperationCall) -> float:
    return worst_db(None if call.beside is None else call.beside.sums)


def _source(call: OperationCall) -> str | None:
    """Name the module whose output reaches an operation on the shortest way."""
    queue, seen = list(call.makers), set[int]()
    while queue:
        one = queue.pop(0)
        if one.module is not None:
            return one.module
        if id(one) not in seen:
            seen.add(id(one))
            queue.extend(one.makers)
    return None


def more_modules(rules: list[str], blame: Blame, outputs: OutputComparison) -> list[str] | None:
    """Return more modules to keep in fp32: the next that goes wrong, what is around it, or what ran before it."""
    name = blame.module
    if blame.cause != "module" or not name:
        return None
    if not any(name == rule or name.startswith(f"{rule}.") for rule in rules):
        return [*rules, name]
    ran = [call.name for call, _ in outputs.calls]
    outer = name.rpartition(".")[0]
    while outer:
        if outer in ran:
            return [*(rule for rule in rules if not rule.startswith(f"{outer}.")), outer]
        outer = outer.rpartition(".")[0]
    before = [other for other in ran[: ran.index(name)] if other not in rules and not other.startswith(f"{name}.")]
    return [*rules, before[-1]] if before and before[-1] else None


def half_precision_state(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of what a module holds and a step may add to: buffers, and tensors in attributes."""
    state: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in [*part.named_buffers(recurse=False), *vars(part).items()]:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                state[_modules.plain_name(prefix) + key if name else key] = value.detach().clone()
    return state


def worst_db(sums: Tensor | None) -> float:
    """Return the lowest SQNR of a comparison, of all of a tensor or of what differs between the samples.

    Infinite where there is none to compare.
    """
    if sums is None:
        return math.inf
    ratios = [float(fidelity(part)[0]) for row in sums.reshape(-1, 6) for part in (row[:3], row[3:])]
    return min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.inf)


def plain_db(sums: Tensor | None) -> float:
    """Return the lowest SQNR of a comparison, of all of a tensor; NaN without one."""
    return math.nan if sums is None else min(float(fidelity(row[:3])[0]) for row in sums.reshape(-1, 6))


def _bad(tensors: Sequence[Tensor]) -> bool:
    """Return whether a value is NaN or plus infinity: masks have negative infinities on purpose."""
    return any(bool((torch.isnan(t) | torch.isposinf(t)).any()) for t in tensors)


def _plain(name: str) -> str:
    return name.strip("_").removeprefix("i") if name in ("__iadd__", "__isub__", "__imul__") else name.strip("_")
