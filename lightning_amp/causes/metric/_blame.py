"""Find the first wrong module or operation, by comparing outputs in AMP and in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.findings import EvaluationReport
from lightning_amp.numerics import count_nonfinite, fidelity
from lightning_amp.shadow import OutputComparison
from lightning_amp.tracing import COMPARISONS_WITH_TARGETS, OperationCall, OperationWatch, nonfinite_entries, plain

_WRONG_DB = 20.0
"""An output below it is wrong: the error is above a tenth of the output, or of its variation between samples."""
_LOST_DB = 6.0
"""A module or operation is to blame if the SQNR falls by at least this much from its inputs to its output."""
_CLEAR = 0.25
"""The least relative difference of a metric at which lost variation between samples matters."""


@final
@dataclass(frozen=True, slots=True)
class Blame:
    """The first wrong module or operation in a batch."""

    report: EvaluationReport  # its cause is `"unknown"` if nothing is wrong
    source: str | None = None  # the module whose output goes into the wrong operation
    only_varying: bool = False  # only the variation between the samples is wrong

    @property
    def may_be_an_operation(self) -> bool:
        """Return whether the operation is still unknown."""
        return self.report.cause not in ("batch", "weights")

    @property
    def is_slight(self) -> bool:
        """Return whether the error does not matter, as in untrained models, whose samples are nearly alike."""
        amp, fp32 = self.report.batch_amp, self.report.batch_fp32
        return self.only_varying and abs(amp - fp32) < _CLEAR * min(abs(amp), abs(fp32))

    @property
    def first_in_fp32(self) -> str | None:
        """Return the first module to keep in fp32, if there is one."""
        return (self.report.module if self.report.cause == "module" else self.source) or None


def blame_module(report: EvaluationReport, outputs: OutputComparison) -> Blame:
    """Find the first module, innermost first, whose output is wrong although its input is not.

    The outermost module, which has no name, stands for the step and is left out. If the metric of the batch is not
    finite, only an output that is not finite is wrong. This waits for the device.
    """
    nonfinite = not math.isfinite(report.batch_amp)
    wrong: Blame | None = None
    for amp_run, fp32_run in outputs.calls:
        if not amp_run.name:
            continue
        named = replace(report, cause="module", module=amp_run.name, module_class=amp_run.kind)
        if _bad(amp_run.outputs):
            if not _bad(amp_run.inputs) and not _bad(fp32_run.outputs):
                return Blame(replace(named, input_sqnr_db=worst_db(amp_run.input_sums)))
        elif wrong is None and not nonfinite:
            before, after = worst_db(amp_run.input_sums), worst_db(amp_run.sums)
            if _is_lost(before, after):
                named = replace(named, input_sqnr_db=before, output_sqnr_db=after)
                wrong = Blame(named, only_varying=_plain_db(amp_run.sums) >= _WRONG_DB)
    return wrong or Blame(replace(report, cause="unknown"))


def _is_lost(before: float, after: float) -> bool:
    return after < _WRONG_DB and before > after + _LOST_DB


def origin_in_fp32(
    report: EvaluationReport,
    outputs: OutputComparison,
    batch: object,
    module: nn.Module,
    elsewhere: Mapping[str, tuple[int, str]] | None = None,
) -> Blame:
    """Find the batch, weight, buffer, module or operation to blame if a metric is not finite in fp32 either.

    `elsewhere` has the parameters of a sharded module that are not finite on any rank, with that rank and its shard.
    """
    elsewhere = elsewhere or {}
    report = replace(report, in_fp32_too=True)
    entries = tuple(f"{count} in `batch{path}`" for path, count in nonfinite_entries(batch))
    first = next((call for call in outputs.reference if _bad(call.outputs)), None)
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    named = {_modules.plain_name(name): tensor for name, tensor in named.items() if tensor.is_floating_point()}

    def is_bad(name: str) -> bool:
        return name in elsewhere or bool(count_nonfinite(named[name]))

    def of_weights(report: EvaluationReport, names: Sequence[str]) -> Blame:
        rank, shard = next((elsewhere[name] for name in names if name in elsewhere), (report.rank, ""))
        return Blame(replace(report, cause="weights", names=tuple(names), rank=rank, shard=shard))

    reached = report if first is None else replace(report, module=first.name, module_class=first.kind)
    if first is not None and not _bad(first.inputs):
        own = [name for name in named if name.rpartition(".")[0] == first.name and is_bad(name)] or sorted(elsewhere)
        if own:
            return of_weights(reached, own)
        return Blame(replace(reached, cause="module") if first.name else replace(report, cause="operation"))
    if entries:
        return Blame(replace(reached, cause="batch", names=entries))
    spoilt = list(filter(is_bad, named))
    return of_weights(report, spoilt) if spoilt else Blame(replace(report, cause="operation"))


def blame_operation(blame: Blame, fp32_run: OperationWatch, amp_run: OperationWatch) -> Blame:
    """Add the operation and the user's line. Without a wrong module, look for an operation outside of modules."""
    report = blame.report
    if not blame.may_be_an_operation:
        return blame
    for call in (fp32_run if report.in_fp32_too else amp_run).calls:
        if report.cause == "module":
            if call.module != report.module and not str(call.module).startswith(f"{report.module}."):
                continue
        elif call.module is not None:
            continue
        beside = call.beside
        assert beside is not None  # a comparing watch sets it for each call
        before = min((_worst_db_of(source) for source in call.makers), default=math.inf)
        after = math.nan if beside.is_bad else worst_db(beside.sums)
        if _is_guilty(call, report, before, after):
            place = "" if call.key.place is None else str(call.key.place)
            report = replace(report, operation=_plain(beside.written), place=place)
            if report.cause == "module":
                return replace(blame, report=report)
            report = replace(report, cause="operation", input_sqnr_db=before, output_sqnr_db=after)
            return Blame(report, _source(call), only_varying=_plain_db(beside.sums) >= _WRONG_DB)
    return blame


def _is_guilty(call: OperationCall, report: EvaluationReport, before: float, after: float) -> bool:
    beside = call.beside
    if beside is None:
        return False
    if beside.is_bad:
        fp32_run = None if beside.reference is None else beside.reference.beside
        return not beside.takes_bad and (report.in_fp32_too or (fp32_run is not None and not fp32_run.is_bad))
    if not math.isfinite(report.batch_amp) or beside.is_blameless:
        return False
    has_target = beside.takes_exact and plain(call.name) in COMPARISONS_WITH_TARGETS
    return _is_lost(before, after) and not has_target


def _worst_db_of(call: OperationCall) -> float:
    return worst_db(None if call.beside is None else call.beside.sums)


def _source(call: OperationCall) -> str | None:
    """Name the module whose output reaches an operation through the fewest other operations."""
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
    """Add a module to keep in fp32: the next wrong one, its parent, or the module that ran before it."""
    name = blame.report.module
    if blame.report.cause != "module" or not name:
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


def worst_db(sums: Tensor | None) -> float:
    """Return the lowest SQNR of whole tensors and of the variation between samples; infinity without a comparison."""
    if sums is None:
        return math.inf
    ratios = [float(fidelity(part)[0]) for row in sums.reshape(-1, 6) for part in (row[:3], row[3:])]
    return min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.inf)


def _plain_db(sums: Tensor | None) -> float:
    """Return the lowest SQNR of whole tensors; NaN if there is nothing to compare."""
    return math.nan if sums is None else min(float(fidelity(row[:3])[0]) for row in sums.reshape(-1, 6))


def _bad(tensors: Sequence[Tensor]) -> bool:
    """Return whether a value is NaN or plus infinity: masks have negative infinities on purpose."""
    return any(bool((torch.isnan(t) | torch.isposinf(t)).any()) for t in tensors)


def _plain(name: str) -> str:
    return name.strip("_").removeprefix("i") if name in ("__iadd__", "__isub__", "__imul__") else name.strip("_")
