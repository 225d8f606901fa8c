"""`OverflowReport`: the record of one skipped step, and the text that `OverflowLocator` prints of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._plain_data import plain
from lightning_amp._text import exact, listed, named, rounded
from lightning_amp.findings import Remedy, StepRecord
from lightning_amp.numerics import fitting_scale
from lightning_amp.reports._overflow_words import (
    EPSILONS,
    by_hand,
    cause_words,
    failed,
    fitting_epsilon,
    for_any_precision,
    line_of,
    that_worked,
    worked,
)
from lightning_amp.tracing import Diagnosis, Operation, domain

_GROWN = 1e2
_IN_ANY_PRECISION = {"logsigmoid", "epsilon", "finite mask", "clamp", "zero_infinity"}

ScaleIs = Literal["", "dynamic", "static", "lowest"]
Cause = Literal["batch", "weights", "learning rate", "forward", "loss", "backward", "not reproduced"]


def cause_of(found: Diagnosis) -> Cause:
    """Return the cause of a diagnosis, as a report names it."""
    return "not reproduced" if found.cause == "none" else found.cause


@final
@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One skipped step.

    .. code-block:: python

        locator = OverflowLocator()
        plugin = AmpPrecision("fp16", scaler=2.0**24)  # static, and too high
        L.Trainer(plugins=[plugin], callbacks=[locator], max_epochs=1).fit(model, data)
        report = locator.reports[0]
        print(report)  # the text that was logged
        print(report.cause, report.diagnosis.module, report.parameters)

    Attributes:
        record: The skipped step: index, optimizer, scale, reason.
        rank: The rank of the process that had the batch.
        world_size: The number of processes.
        epoch: The epoch of the step.
        batch_idx: The batch whose replay failed; the last batch of the window if no replay failed.
        window: First and last batch since the last attempted step; they differ only with accumulation.
        num_replayed: How many batches of the window were run again, from its end.
        cause: As in :class:`~lightning_amp.tracing.Diagnosis`; `"not reproduced"` if every replay was finite;
            `"learning rate"` if a parameter is not finite since a step whose learning rate was not.
        diagnosis: Module, tensor and magnitudes.
        parameters: Names of all parameters whose gradients were not finite.
        largest_gradient: The largest true gradient of the batch, computed in fp32. Only with cause `"backward"`.
        note: The reason why the replay may not be exact, or why there was no replay; empty if all is well.
        precision: The precision of the run: `"16-mixed"`, `"bf16-mixed"`, `"32-true"`.
        remedies: The remedies tried in replays of the step; empty if the cause was known.
        is_repeated: Whether an earlier report names the same cause, so that nothing was tried.
        largest_weights: Largest magnitude of a parameter at the start of the fit, and now.
        scale_is: `"dynamic"`, `"static"`, or `"lowest"` if the loss scale cannot fall further; empty without a scale.
        shard: The part of a sharded module that has the fault, with its mesh dimension; empty if it is in no single
            part.
        bad_rate: With cause `"learning rate"`: the index of the step that used it, and the learning rate.
    """

    record: StepRecord
    rank: int
    world_size: int
    epoch: int
    batch_idx: int
    window: tuple[int, int]
    num_replayed: int
    cause: Cause
    diagnosis: Diagnosis
    parameters: tuple[str, ...]
    largest_gradient: float | None = None
    note: str = ""
    precision: str = ""
    remedies: tuple[Remedy, ...] = ()
    is_repeated: bool = False
    largest_weights: tuple[float, float] | None = None
    scale_is: ScaleIs = ""
    shard: str = ""
    bad_rate: tuple[int, float] | None = None

    @property
    def working_scale(self) -> float | None:
        """Return the loss scale at which a replay was finite; `None` if no such scale was found."""
        return next((r.values[0] for r in self.remedies if r.kind == "scale" and r.worked), None)

    @property
    def in_one_line(self) -> str:
        """Return the cause, the line of code and the advice, in one line."""
        line = line_of(self.diagnosis)
        return f"{_cause(self)}{f'; in {line}' if line else ''}. Try: {_cure(self)}"

    @property
    def is_calibration(self) -> bool:
        """Return whether the step is no fault, because a dynamic scale was too high and falls to a scale that works."""
        return self.cause == "backward" and self.scale_is == "dynamic" and self.working_scale is not None

    def as_dict(self) -> dict[str, Any]:
        """Return dictionaries, lists, texts and numbers, which `torch.load(weights_only=True)` accepts."""
        return plain(asdict(self), float)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """Build a report from the result of :meth:`as_dict`."""
        found = dict(values["diagnosis"])
        shape = found["shape"]
        found["shape"] = None if shape is None else tuple(shape)
        found["entries"] = tuple((path, count) for path, count in found["entries"])
        operation = found["operation"]
        if operation is not None:
            lists: dict[str, Any] = {name: tuple(operation[name]) for name in ("shape", "index")}
            found["operation"] = Operation(**{**operation, **lists})
        own: dict[str, Any] = dict(values)
        remedies, weights = values["remedies"], values["largest_weights"]
        own["remedies"] = tuple(Remedy(kind, tuple(inside), worked) for kind, inside, worked in remedies)
        own["largest_weights"] = None if weights is None else tuple(weights)
        own["bad_rate"] = None if values["bad_rate"] is None else tuple(values["bad_rate"])
        own["record"] = StepRecord(**values["record"])
        own["window"], own["parameters"] = tuple(values["window"]), tuple(values["parameters"])
        own["diagnosis"] = Diagnosis(**found)
        return cls(**own)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @override
    def __str__(self) -> str:
        where = f"batch {self.batch_idx}"
        if self.window[0] != self.window[1]:
            where += f" (of batches {self.window[0]} to {self.window[1]}, which make one step)"
        shard = f" ({self.shard})" if self.shard else ""
        rank = f", rank {self.rank}{shard}" if self.world_size > 1 else ""
        taken = "was taken although its loss is not finite, since its gradients are"
        lines = [
            f"step {self.record.index} {'was skipped' if self.record.skipped else taken}: epoch {self.epoch},"
            f" {where}{rank}, loss scale {exact(self.record.scale)}",
            f"  cause: {_cause(self)}",
        ]
        if line := line_of(self.diagnosis):
            lines.append(f"  line: {line}")
        lines += [f"  before it: {text}" for text in _rounded_before(self)]
        if self.parameters:
            lines.append(f"  non-finite gradients: {named(self.parameters)}")
        if self.note:
            lines.append(f"  note: {self.note}")
        if self.is_repeated and self.cause != "not reproduced":
            lines.append("  an earlier report of this cause has the advice")
        elif _was_replayed(self):
            lines.append(f"  try: {_cure(self)}")
        return "\n".join(lines)


# -- words -------------------------------------------------------------------------------------------------------------


def _was_replayed(report: OverflowReport) -> bool:
    return report.cause != "not reproduced" or report.num_replayed > 0


def _cause(report: OverflowReport) -> str:
    if report.bad_rate is not None:
        step, rate = report.bad_rate
        is_what = "NaN" if math.isnan(rate) else "infinite"
        return f"`{report.diagnosis.parameter}` is not finite since step {step:,}, whose learning rate was {is_what}"
    if report.cause != "not reproduced":
        return cause_words(report.diagnosis, is_scaled=report.record.scale != 1)
    if not _was_replayed(report):
        return "not looked for"
    where = f", on all of {report.world_size} ranks" if report.world_size > 1 else ""
    return f"not found: every replay of the batch was finite, forward and backward{where}"


def _rounded_before(report: OverflowReport) -> list[str]:
    """Name the operation whose result half precision rounded too far, if it was found."""
    operation, line = report.diagnosis.operation, line_of(report.diagnosis)
    if operation is None:
        return []
    where = domain(operation.name)
    becomes = where.end if operation.kind == "zero" else where.outside
    so = "" if operation.in_backward else f", so that the argument of `{operation.name}` is {becomes}"
    lost = [remedy.values[2:4] for remedy in report.remedies if remedy.kind == "source in fp32" and remedy.worked]
    return [
        f"the result of `{name}`{f' in {place}' if place not in ('', line) else ''} is rounded to half precision{so}"
        for name, place in lost
    ]


def _cure(report: OverflowReport) -> str:
    """Write the advice: first the remedies that worked, then untried remedies, and never a remedy that failed."""
    found, operation, remedies = report.diagnosis, report.diagnosis.operation, report.remedies
    if report.cause == "batch":
        return "clean the data, or leave this batch out; no precision can help"
    if report.bad_rate is not None:
        return (
            "correct the schedule, or the code that sets the learning rate, and go back to a checkpoint from before"
            f" step {report.bad_rate[0]:,}; no precision can help"
        )
    if report.cause == "weights":
        return "go back to a checkpoint in which it is finite; no step can be taken with such a value, in any precision"
    if report.cause == "not reproduced" and not report.record.skipped:
        return "look at non-deterministic operations, and at earlier batches of the window"
    if report.cause == "not reproduced":
        return (
            "look at hooks and callbacks that edit gradients between the backward and the step, at non-deterministic"
            " operations, and at earlier batches of the window"
        )
    if grown := _grown(report):
        return grown
    if found.in_fp32 == "not finite":
        return f"{for_any_precision(operation, remedies)}; no precision can help"
    if found.in_fp32 == "" and any(r.worked for r in remedies if r.kind in _IN_ANY_PRECISION):
        return for_any_precision(operation, remedies)
    if report.cause == "backward":
        return _on_scale(report)
    helps = [*that_worked(remedies, operation), *filter(None, [by_hand(operation, remedies)])]
    if not helps:
        return _in_general(report)
    text = "; or ".join(helps)
    return f"{text}. Lowering the loss scale cannot help" if report.record.scale != 1 else text


def _grown(report: OverflowReport) -> str:
    if report.largest_weights is None:
        return ""
    before, now = report.largest_weights
    if not (math.isfinite(now) and now > _GROWN * max(before, 1.0)):
        return ""
    return (
        f"a lower learning rate, or gradient clipping: the largest weight has grown from {rounded(before)} to"
        f" {rounded(now)} since the start of this fit"
    )


def _on_scale(report: OverflowReport) -> str:
    operation, remedies = report.diagnosis.operation, report.remedies
    helps = [*that_worked(remedies, operation), *filter(None, [fitting_epsilon(operation, remedies)])]
    size = ""
    if report.largest_gradient is not None:
        size = f": the largest true gradient of this batch is {rounded(report.largest_gradient)}"
    if _has_range_of_fp32(report):
        first = "; or ".join(helps) or f"{EPSILONS}, or what computes their arguments in fp32 (`fp32_modules`)"
        return f"{first}{size}{' in fp32, where nothing is rounded to zero before it' if size else ''}"
    scale = report.working_scale
    if scale is not None and report.scale_is == "dynamic":
        return (
            f"nothing, if it happens now and then: at a scale of {exact(scale)} the step is finite (tried: works), and"
            " the scaler goes there by itself"
        )
    if scale is not None:
        why = "static" if report.scale_is == "static" else "at its `min_scale`, which should be lower"
        other = ", or a dynamic one" if report.scale_is == "static" else ""
        return f"a loss scale of {exact(scale)} or below (tried: works){other}{size}, and this scale is {why}"
    if divisor := worked(remedies, "divisor"):
        largest, room = report.largest_gradient, divisor[0]
        if largest is not None:
            room = max(room, 1 / fitting_scale(largest, lowest=-126))
        return (
            f"dividing the loss by a constant ({exact(room)} at least; tried: works), or 'bf16'{size},"
            " which does not fit into fp16 even without a loss scale"
        )
    tried = [exact(r.values[0]) for r in remedies if r.kind == "scale"]
    none = f"; no loss scale helps (tried: {listed(tried, 4)})" if tried else ""
    fits = size and (report.largest_gradient or 0) <= 65504
    lost = ", which fits; something on the way to it does not" if fits else ""
    if not helps and report.diagnosis.in_fp32 == "finite" and not failed(remedies, "bf16"):
        helps = ["'bf16', which has the range of fp32"]
    return f"{'; or '.join(helps) or 'look at that line'}{none}{size}{lost}"


def _in_general(report: OverflowReport) -> str:
    """Write the advice if the operation is not known, or if no tried remedy worked."""
    found = report.diagnosis
    if report.cause == "loss":
        return (
            "compute the loss in fp32 (`.float()` on its inputs) and in a stable form (`cross_entropy`,"
            " `logsumexp`, an epsilon under roots and quotients)"
        )
    if _has_range_of_fp32(report) or found.dtype == "bfloat16":
        return (
            "making the inputs of the module smaller (a normalisation before it), and epsilons under roots,"
            " logarithms and quotients; 'fp32' holds no larger numbers than bfloat16"
        )
    tried = any(remedy.kind == "bf16" for remedy in report.remedies)
    first = "" if tried else "'bf16', which has the range of fp32; or "
    smaller = "make the inputs of the module smaller (a normalisation before it)"
    return f"{first}{smaller}. Lowering the loss scale cannot help"


def _has_range_of_fp32(report: OverflowReport) -> bool:
    return report.precision in ("bf16-mixed", "32-true")
