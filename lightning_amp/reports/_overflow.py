"""`Overflow`: the record of one skipped step, and all words that `OverflowLocator` prints of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._plain_data import plain
from lightning_amp._text import counted, exact, named, rounded
from lightning_amp.findings import Op, StepRecord, TriedRemedy
from lightning_amp.numerics import FP16_LARGEST
from lightning_amp.tracing import EXPONENTIALS, domain
from lightning_amp.tracing import plain as plain_name

ScaleIs = Literal["", "dynamic", "static", "lowest"]
Cause = Literal["batch", "weights", "learning rate", "forward", "loss", "backward", "not reproduced"]


@final
@dataclass(frozen=True, slots=True)
class Overflow:
    """One skipped step.

    .. code-block:: python

        locator = OverflowLocator()
        plugin = AmpPrecision("fp16", scaler=2.0**24)  # static, and too high
        L.Trainer(plugins=[plugin], callbacks=[locator], max_epochs=1).fit(model, data)
        report = locator.reports[0]
        print(report)  # the text that was logged
        print(report.cause, report.module, report.line, report.parameters)

    Attributes:
        record: The skipped step: index, optimizer, scale, reason, precision.
        rank: The rank of the process that had the batch.
        world_size: The number of processes.
        epoch: The epoch of the step.
        batch_idx: The batch whose replay failed; the last batch of the window if no replay failed.
        window: First and last batch since the last attempted step; they differ only with accumulation.
        num_replayed: How many batches of the window were run again, from its end.
        cause: `"batch"`: the batch has NaN or infinity. `"weights"`: a parameter or buffer has. `"learning rate"`: a
            parameter is not finite since a step whose learning rate was not. `"forward"`: an operation in a module, or
            before one, made the first bad value. `"loss"`: an operation after all submodules did. `"backward"`: the
            loss was finite, its gradient was not. `"not reproduced"`: no replay showed the same fault.
        module: Qualified name of the module whose code ran the operation, or first took the bad value; `None` outside
            of all submodules.
        operation: The operation that made the first bad value or gradient, if it is known.
        parameter: With cause `"weights"` or `"learning rate"`: the parameter or buffer that is not finite.
        entries: With cause `"batch"`, the bad parts of the batch: path, number of bad values, number of values, index
            of the first bad value, `"NaN"` or `"infinity"`.
        parameters: Names of all parameters whose gradients were not finite.
        in_fp32: Whether the same step is finite in fp32; empty if no fp32 step was run. `"finite gradients"`: fp32
            takes the skipped step, because only its loss is not finite.
        fitting_scale: The loss scale at which the gradients fit, if they are finite at a lower scale.
        largest_gradient: The largest true gradient in half precision, if the gradients are finite at a lower scale.
        remedies: The settings that were tried in replays of the step, as code, each with whether it works.
        note: The reason why the replay may not be exact, or why there was no replay; empty if all is well.
        growth: If weights have grown by orders of magnitude: `"largest"`, or `"typical"` (the median of the RMS of
            matrices), and this magnitude at the start of the fit and now.
        scale_is: `"dynamic"`, `"static"`, or `"lowest"` if the loss scale cannot fall further; empty without a scale.
        shard: The part of a sharded module that has the fault, with its mesh dimension; empty if it is in no single
            part.
        bad_rate: With cause `"learning rate"`: the index of the step that used it, and the learning rate.
        is_buffer: Whether `parameter` is a buffer.
        position: The place of the fault in the order of the step's operations; a large number if the bad values came
            from another rank.
    """

    record: StepRecord
    rank: int
    world_size: int
    epoch: int
    batch_idx: int
    window: tuple[int, int]
    num_replayed: int = 0
    cause: Cause = "not reproduced"
    module: str | None = None
    operation: Op | None = None
    parameter: str = ""
    entries: tuple[tuple[str, int, int, tuple[int, ...], str], ...] = ()
    parameters: tuple[str, ...] = ()
    in_fp32: Literal["", "finite", "finite gradients", "not finite"] = ""
    fitting_scale: float | None = None
    largest_gradient: float | None = None
    remedies: tuple[TriedRemedy, ...] = ()
    note: str = ""
    growth: tuple[str, float, float] | None = None
    scale_is: ScaleIs = ""
    shard: str = ""
    bad_rate: tuple[int, float] | None = None
    position: int = 0
    is_buffer: bool = False

    @property
    def line(self) -> str:
        """Return the file and the line that are to blame, joined by a colon; empty if they are not known."""
        operation = self.operation
        return f"{Path(operation.file).name}:{operation.line}" if operation is not None and operation.file else ""

    @property
    def is_harmless(self) -> bool:
        """Return whether a dynamic scale was too high, and falls to a scale at which the step is finite."""
        return self.scale_is == "dynamic" and self.fitting_scale is not None and self.fitting_scale >= 1

    @property
    def key(self) -> str:
        """Return kind, module and line of the cause: equal for all steps that show it."""
        if self.fitting_scale is not None:
            return "scale"
        if self.cause in ("batch", "not reproduced"):
            return self.cause
        name = "" if self.operation is None else self.operation.name
        return f"{self.cause}, {self.module}, {self.line or name or self.parameter}"

    @property
    def in_one_line(self) -> str:
        """Return the cause, the line of code and the advice, in one line."""
        return "; ".join(filter(None, (_what(self), _where(self), f"fix: {_fix(self)}")))

    def as_dict(self) -> dict[str, Any]:
        """Return dictionaries, lists, texts and numbers, which `torch.load(weights_only=True)` accepts."""
        return plain(asdict(self), float)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Overflow:
        """Build a report from the result of :meth:`as_dict`."""
        own = {name: _tuples(value) for name, value in values.items()}
        own["record"], operation = StepRecord(**values["record"]), values["operation"]
        own["operation"] = operation and Op(**{name: _tuples(value) for name, value in operation.items()})
        own["remedies"] = tuple(TriedRemedy(*one) for one in values["remedies"])
        return cls(**own)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @override
    def __str__(self) -> str:
        batch = f"batch {self.batch_idx}"
        if self.window[0] != self.window[1]:
            batch += f" of {self.window[0]} to {self.window[1]}, which make one step"
        rank = f", rank {self.rank}{self.shard and f', {self.shard}'}" if self.world_size > 1 else ""
        taken = "skipped" if self.record.skipped else "was taken although its loss is not finite"
        is_before = self.record.skipped or self.cause not in ("forward", "loss", "weights")
        after = "" if is_before else "with the weights after it, "
        lines = [f"Step {self.record.index} {taken} ({batch}{rank}): {after}{_what(self)}"]
        if where := _where(self):
            lines.append(f"  {where}")
        if self.note:
            lines.append(f"  note: {self.note}")
        if self.num_replayed:
            lines.append(f"  fix: {_fix(self)}")
        return "\n".join(lines)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- what, and where ---------------------------------------------------------------------------------------------------

_VALUES = {"nan": "NaN", "inf": "infinity", "-inf": "minus infinity", "": "NaN or infinity"}


def _what(report: Overflow) -> str:
    """Name the cause in one sentence."""
    operation, precision = report.operation, report.record.precision or "fp32"
    if operation is not None and operation.dtype == "float16":
        precision = "fp16"  # in other precisions a cast by hand
    if report.cause == "batch":
        return f"the batch contains {report.entries[0][-1]}"
    if report.bad_rate is not None:
        step, rate = report.bad_rate
        since = f"since step {step:,}, whose learning rate was {'NaN' if math.isnan(rate) else 'infinite'}"
        return f"`{report.parameter}` is not finite {since}"
    if report.cause == "weights":
        return f"`{report.parameter}` is not finite"
    if report.cause == "not reproduced":
        return "cause not found, no replay shows the same fault" if report.num_replayed else "cause not looked for"
    part = f"in the {report.cause}"
    loss = ""
    if report.cause == "backward":
        part += f" at loss scale {exact(report.record.scale)}" if report.record.scale != 1 else ""
        loss = "; the loss is finite"
    if report.fitting_scale is not None or _leaves_range(report):
        return f"{precision} overflow {part}{loss}"
    value = _VALUES["" if operation is None else operation.result]
    also = {"": "", "finite": f", in {precision} only"}.get(report.in_fp32, ", in fp32 too")
    also += ", which takes this step because its gradients are finite" * (report.in_fp32 == "finite gradients")
    return f"{value} {part}{also}{loss}"


def _leaves_range(report: Overflow) -> bool:
    """Return whether the value is finite in fp32, and too large for the format."""
    operation = report.operation
    if operation is None or report.in_fp32 != "finite":
        return False
    is_too_large = operation.dtype == "float16" and (operation.largest_in_fp32 or 0) > FP16_LARGEST
    return operation.kind in ("sum", "cast") or (operation.in_backward and operation.kind != "zero") or is_too_large


def _where(report: Overflow) -> str:
    """Name the module, the operation with its value, and the line."""
    operation = report.operation
    if report.cause == "batch":
        return "; ".join(
            f"batch{path}: {count:,} of {counted(total, 'value')}{f', first at {list(first)}' if first else ''}"
            for path, count, total, first, _ in report.entries
        ).replace("['", '["').replace("']", '"]')  # fmt: skip
    if report.cause in ("weights", "learning rate"):
        return f"{report.module} takes it first" if report.module and report.bad_rate is None else ""
    if report.cause == "not reproduced" or operation is None:
        gradients = f"the gradients of {named(report.parameters)} are not finite" if report.parameters else ""
        return f"{report.module}: {gradients}" if report.module else gradients
    code = f"      {report.line}  {shorten(operation.code, 64, placeholder=' ...')}" if report.line else ""
    return f"{operation.module or 'training_step'}: {_value(report, operation)}{code}"


def _value(report: Overflow, operation: Op) -> str:
    ends = f", fp16 ends at {FP16_LARGEST:,.0f}" if operation.dtype == "float16" else ""
    special = _special(operation, report.in_fp32)
    if operation.in_backward:
        if report.largest_gradient is not None and operation.largest_in_fp32 is not None:
            return f"{operation.name} gave a true gradient of {rounded(operation.largest_in_fp32)}{ends}"
        if operation.kind == "cast" and operation.largest_input is not None:
            return f"{operation.name} takes an input of {rounded(operation.largest_input)}{ends}"
        verb = "got" if operation.is_sum else "gave"
        return f"{operation.name} {verb} a gradient of {_VALUES[operation.result]}{special}"
    source = operation.largest_input
    largest = source if operation.kind == "cast" else operation.largest_in_fp32
    if _leaves_range(report) and largest is not None:
        is_outlier = not special and operation.kind != "cast" and source is not None and source > largest / 10
        given = f" from an input of {rounded(source)}" if is_outlier and source is not None else ""
        return f"{operation.name} gave {rounded(largest)}{given}{ends}{special}"
    if not special and source is not None:
        special = f"; its largest input is {rounded(source)}"
    return f"{operation.name} gave {_VALUES[operation.result]}{special}"


def _special(operation: Op, in_fp32: str) -> str:
    """Name what is special about the arguments of an operation."""
    where, is_lost = domain(operation.name), in_fp32 == "finite" and operation.kind_in_fp32 != operation.kind
    only_here = ", which it is not in fp32" if is_lost else ""
    argument = "a divisor" if operation.name in ("div", "div_") else "an argument"
    derivative = ", where it has no finite derivative" if operation.in_backward else ""
    words = {
        "empty": "it is taken over no values",
        "ignored": "each label of the batch is ignored, so that the mean is taken over no values",
        "masked": "a row is masked entirely, all of it minus infinity",
        "one": "the spread of a single value, divided by 0",
        "zero": f"{argument} is {where.end}{derivative}{only_here}",
        "negative": f"{argument} is {where.outside}{only_here}",
        "infinite": "an input is infinite, and 0 times infinity, or infinity minus infinity, is NaN",
        "sum": f"it adds up {operation.count:,} finite values",
        "state": "an input is NaN that no operation of this step made, such as state in an attribute",
    }
    return f": {words[operation.kind]}" if operation.kind in words else ""


# -- the fix -----------------------------------------------------------------------------------------------------------


def _fix(report: Overflow) -> str:
    """Write the remedies that worked, then advice that was not tried, and never a remedy that failed."""
    if report.cause == "batch":
        return "the data; no precision helps. Later ones are counted only"
    if report.bad_rate is not None:
        return f"the schedule; go back to a checkpoint before step {report.bad_rate[0]:,}"
    if report.cause == "weights":
        back = "go back to a checkpoint in which it is finite"
        if report.is_buffer:
            return f"`restore_buffers=[{report.parameter!r}]`, if a skipped step wrote to it (not tried); and {back}"
        return f"{back}, with a lower learning rate if weights had grown; no precision helps"
    if report.growth is not None:
        return describe_growth(*report.growth)
    if report.cause == "not reproduced":
        hooks = "hooks that edit gradients, " if report.record.skipped else "the learning rate, values it mended, "
        return (
            f"look at {hooks}non-deterministic operations, earlier batches of the window, later calls of a closure,"
            " and counters in the module, which the replay finds advanced"
        )
    fixes = [f"{setting} (tried: works)" for setting, works in report.remedies if works]
    if report.fitting_scale is None and not (fixes and _advice_on(report.operation, report.in_fp32) in ("", _SMALLER)):
        fixes.append(f"{_advice(report)} (not tried)")
    text = ", or ".join(fixes) or "smaller gradients (not tried)"
    return f"{text}; no precision helps this step" if report.in_fp32 == "not finite" else text


def describe_growth(which: str, before: float, now: float) -> str:
    """Write the advice for weights that have grown by orders of magnitude."""
    grown = f"the {which} weight has grown from {rounded(before)} to {rounded(now)} since the start"
    return f"a lower learning rate (not tried): {grown}"


_SMALLER = "finite in fp32"
_ADVICE = {
    "masked": "leave at least one entry of each row unmasked, or mask with `torch.finfo(x.dtype).min`",
    "ignored": "leave out batches without a label, or sum the losses and divide by `max(1, count)`",
    "empty": "leave out empty tensors before it, or divide a sum by `max(1, count)`",
    "one": "`correction=0`, or more than one value",
    "infinite": "replace infinities by `torch.where` or `masked_fill` before a product or a sum of them",
    "literal": "a finite value in its place",
    "cast": "keep that tensor in float32",
    "sum": "`.float()` before that sum",
    "ctc_loss": "`zero_infinity=True`, or inputs that are at least as long as their labels need",
    "exp, summed": "subtract the maximum before it (`torch.logsumexp`, `log_softmax`)",
    "exp": "keep the argument of `{name}` small (`.clamp(max=...)`)",
    "log": "a stable form (`F.logsigmoid`, `log_softmax`), or an epsilon in the argument of `log`",
    "rounded log": "a stable form (`F.logsigmoid`, `log_softmax`), or `.float()` where its argument is computed",
    "div": "an epsilon in the divisor",
    "small epsilon": "an epsilon that {precision} holds, such as 1e-4, in the divisor",
    "derivative": "an epsilon in the argument of `{name}`; a `torch.where` behind it does not help",
    "negative": "keep the argument of `{name}` {inside}, by `.clamp` and an epsilon",
    "zero": "an epsilon in the argument of `{name}`",
    "state": "register it as a buffer and name it in `restore_buffers`, or do not keep it if it is not finite",
    "function": "look at the `backward` of `{name}`: what overflows in it, and each quotient, root or logarithm",
    "huge": "find out where {largest_input} comes from: an outlier in the data, or weights that grow",
    _SMALLER: "smaller inputs of that line, such as a normalisation before it",
    "unknown": "the loss in fp32, and an epsilon under roots, logarithms and quotients",
    "": "look at the inputs of that line",
}
"""One sentence of advice for each kind of operation. Nothing of it is tried."""


def _advice(report: Overflow) -> str:
    operation = report.operation
    if operation is None:
        return _ADVICE["unknown"]
    size, inside = rounded(operation.largest_input or 0.0), domain(operation.name).inside
    said = _ADVICE[_advice_on(operation, report.in_fp32)]
    return said.format(name=operation.name, precision=report.record.precision, inside=inside, largest_input=size)


def _advice_on(operation: Op | None, in_fp32: str) -> str:
    """Choose the sentence."""
    if operation is None:
        return "unknown"
    name, kind, is_lost = plain_name(operation.name), operation.kind, in_fp32 == "finite"
    special = "" if operation.is_sum else kind
    if special == "zero" and operation.in_backward:
        return "derivative"
    if special == "zero" and name in ("div", "log"):
        return {"div": "small epsilon", "log": "rounded log"}[name] if is_lost else name
    if special:
        return special
    if name in EXPONENTIALS and not operation.is_sum:
        return "exp, summed" if operation.is_summed else "exp"
    if name == "ctc_loss":
        return name
    if not is_lost and operation.largest_input is not None and operation.largest_input > 1e15:
        return "huge"
    return _SMALLER if is_lost else ""
