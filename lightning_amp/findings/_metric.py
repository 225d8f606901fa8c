"""Records of a metric comparison: a row for each metric and module, and the cause of a difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from typing_extensions import final, override

from lightning_amp._text import named, rounded
from lightning_amp.findings._remedy import TriedRemedy

LOADER_SUFFIX = "/dataloader_idx_"
"""The text that Lightning puts between the name of a metric and the number of its loader."""

_FEW_PERCENT = 0.05


@final
class ComparisonRow(NamedTuple):
    """One metric of one compared validation.

    `step` is the step that the loggers got. `diff` is AMP minus fp32, in the metric's own unit. `relative_diff` is
    `diff` over the magnitude of `fp32` (0 if both are 0, infinite if only `fp32` is 0).
    """

    epoch: int
    step: int
    metric: str
    amp: float
    fp32: float
    diff: float
    relative_diff: float

    @classmethod
    def of(cls, epoch: int, step: int, metric: str, amp: float, fp32: float) -> ComparisonRow:
        """Return a row for the two values."""
        # Equal infinities agree, but their difference would be NaN.
        diff = 0.0 if amp == fp32 else amp - fp32
        if diff == 0.0:
            relative_diff = 0.0
        elif fp32 == 0.0:
            relative_diff = math.nan if math.isnan(diff) else math.copysign(math.inf, diff)
        else:
            relative_diff = diff / abs(fp32)
        return cls(epoch, step, metric, amp, fp32, diff, relative_diff)

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the AMP value and the fp32 value differ by more than `tolerance`.

        A NaN on only one side is a difference.
        """
        if math.isnan(self.amp) or math.isnan(self.fp32):
            return math.isnan(self.amp) != math.isnan(self.fp32)
        return abs(self.diff) > tolerance

    def stands_out(self, largest: float) -> bool:
        """Return whether the AMP value is not finite, or differs from the fp32 value by more than a few per cent.

        `largest` is the largest magnitude of the metric in fp32 so far. If a loss has fallen far below it, small
        differences do not matter.
        """
        if not math.isfinite(self.amp):
            return True
        if not math.isfinite(self.fp32):
            return False
        return abs(self.diff) > max(_FEW_PERCENT * min(abs(self.amp), abs(self.fp32)), 0.005 * largest)

    def is_noise(self, num_rows: int) -> bool:
        """Return whether a share or a count of samples differs by less than two of its standard errors."""
        size, number = max(abs(self.amp), abs(self.fp32)), max(num_rows, 1)
        unit = number if size > 1 and self.amp.is_integer() and self.fp32.is_integer() else 1
        share = min(size / unit, 0.5)
        error = math.sqrt(max(share * (1 - share), 1 / number) / number)
        return size <= unit and abs(self.diff) <= unit * (2 * error + 1 / number)


@final
class ModuleRow(NamedTuple):
    """The outputs of one module in one compared validation, all its calls together.

    Attributes:
        epoch: `trainer.current_epoch`.
        step: `trainer.global_step`.
        name: Qualified name of the module.
        kind: Its class.
        num_calls: Number of calls.
        sqnr_db: SQNR of its outputs against fp32; 6 dB are one correct bit. NaN if an output is not finite.
        varying_sqnr_db: SQNR after subtracting the mean over the batch. It shows the bfloat16 error in
            `x + 1000`, a small part of the output but a large part of the difference between samples.
        cosine: Cosine between the outputs of both runs; NaN if an output is not finite.
        rms: Root mean square of the outputs in fp32.
    """

    epoch: int
    step: int
    name: str
    kind: str
    num_calls: int
    sqnr_db: float
    varying_sqnr_db: float
    cosine: float
    rms: float


# -- why a metric went wrong -------------------------------------------------------------------------------------------

MetricCause = Literal["batch", "weights", "module", "operation", "state", "unknown"]

_DIVISIONS = ("truediv", "div", "itruediv", "rtruediv", "reciprocal")
_ATTENTION = ("softmax", "log_softmax", "scaled_dot_product_attention", "multi_head_attention_forward")
_LOOK_FOR = {
    **dict.fromkeys(_DIVISIONS, "a divisor that is 0"),
    **dict.fromkeys(_ATTENTION, "a row that is masked entirely"),
    "log": "a value of 0 or below",
    "sqrt": "a value below 0",
    "rsqrt": "a value of 0 or below",
    "exp": "a value above 88, beyond which `exp` leaves float32",
    "mean": "a mean over no values",
    "cross_entropy": "a batch whose labels are all left out (`ignore_index`)",
}


@final
@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The reason why a metric is not finite, or differs from fp32.

    .. code-block:: python

        comparison = MetricComparison()
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison], max_epochs=1).fit(model, data)
        if comparison.report is not None:
            print(comparison.report)  # the text of the warning
            print(comparison.report.module, [tried.setting for tried in comparison.report.tried if tried.works])

    Attributes:
        metric: The name of the metric in `trainer.callback_metrics`.
        amp: The metric in mixed precision, over the whole validation.
        fp32: The metric in fp32, over the whole validation.
        cause: `"batch"`: the batch is not finite. `"weights"`: a parameter or buffer is not finite. `"module"`: the
            output of a module is wrong although its input is correct. `"operation"`: the result of an operation outside
            of all modules is wrong. `"state"`: a value that adds up over batches in half precision. `"unknown"`: no
            batch shows the difference.
        epoch: `trainer.current_epoch`.
        rank: Rank of the process that had the batch, or that has the shard with the fault.
        world_size: Number of processes.
        loader_idx: Index of the batch's loader; `None` with one.
        batch_idx: The first batch that shows the difference; `None` if no single batch shows it.
        batch_amp: The metric in mixed precision, over this batch alone.
        batch_fp32: The metric in fp32, over this batch alone.
        in_fp32_too: Whether the metric is not finite in fp32 either, so that no precision can help.
        names: The faulty values, with cause `"batch"`, `"weights"` or `"state"`.
        module: Qualified name of the first module whose output is wrong.
        module_class: Its class.
        input_sqnr_db: SQNR of the module's input against fp32; infinite if both are equal.
        output_sqnr_db: SQNR of its output; NaN if the output is not finite.
        operation: The operation, such as `"cos"`; empty if it is not known.
        place: The line of the user's code that calls it.
        tried: The remedies that were tried, in this order.
        note: The reason why the cause was not narrowed down further.
        shard: The part of a sharded weight that has the fault, with its mesh dimension; empty if it is in no single
            part.

    """

    metric: str
    amp: float
    fp32: float
    cause: MetricCause = "unknown"
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    loader_idx: int | None = None
    batch_idx: int | None = None
    batch_amp: float = math.nan
    batch_fp32: float = math.nan
    in_fp32_too: bool = False
    names: tuple[str, ...] = ()
    module: str | None = None
    module_class: str = ""
    input_sqnr_db: float = math.inf
    output_sqnr_db: float = math.nan
    operation: str = ""
    place: str = ""
    tried: tuple[TriedRemedy, ...] = ()
    note: str = ""
    shard: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain types."""
        return asdict(self)

    @override
    def __str__(self) -> str:
        shard = f" ({self.shard})" if self.shard else ""
        rank = f", rank {self.rank}{shard}" if self.world_size > 1 else ""
        lines = [f"`{self.metric}` is {rounded(self.amp)} in AMP and {rounded(self.fp32)} in fp32 (epoch {self.epoch})"]
        if self.batch_idx is not None:
            loader = "" if self.loader_idx is None else f" of loader {self.loader_idx}"
            values = f": AMP {rounded(self.batch_amp)}, fp32 {rounded(self.batch_fp32)}"
            lines.append(f"  first seen: batch {self.batch_idx}{loader}{rank}{values}")
        lines.append(f"  cause: {self._cause()}")
        if self.operation:
            of_step = " (outside of all modules)" if self.cause == "operation" else ""
            lines.append(f"  operation: `{self.operation}`{of_step}" + (f", {self.place}" if self.place else ""))
        if self.note:
            lines.append(f"  note: {self.note}")
        if advice := self._advice():
            lines.append(f"  {advice}")
        return "\n".join(lines)

    def _cause(self) -> str:
        too = ", in fp32 too" if self.in_fp32_too else ""
        reached = f"; they first reach `{self.module}` ({self.module_class})" if self.module else ""
        match self.cause:
            case "batch":
                return f"the batch itself has values that are not finite ({', '.join(self.names)}){reached}"
            case "weights":
                return f"values that are not finite in {named(self.names)}{reached}"
            case "state":
                return f"a value that adds up over the batches in half precision: {', '.join(self.names)}"
            case "module":
                return f"the output of `{self.module}` ({self.module_class}) {self._noise()}{too}"
            case "operation":
                before = "" if self.in_fp32_too else "the outputs of all modules are as in fp32; "
                return f"{before}a value that the step computes outside of all modules {self._noise()}{too}"
            case "unknown":
                return "not found"

    def _noise(self) -> str:
        if math.isnan(self.output_sqnr_db):
            return "is not finite, although its input is"
        before = "is exact" if math.isinf(self.input_sqnr_db) else f"has {self.input_sqnr_db:.0f}"
        return f"is wrong: it has {self.output_sqnr_db:.0f} dB of SQNR against fp32, and its input {before}"

    def _advice(self) -> str:
        if self.cause == "batch":
            return "try: clean the data, or leave these rows out of the metric; no precision can help"
        if self.cause == "weights":
            return "try: an earlier checkpoint; the values are the same in fp32, so no precision can help"
        if self.in_fp32_too:
            what = _LOOK_FOR.get(self.operation)
            where = f"look for {what}" if what else "look at the input of the operation"
            return f"try: {where}; it is not finite in fp32 either, so no precision can help"
        if self.cause == "state":
            works = [one for one in self.tried if one.works]
            return f"tried: in float32 it works: {rounded(works[0].value)} over the same batches" if works else ""
        words = [
            f"`{one.setting}` works: {rounded(one.value)} on this batch"
            if one.works
            else f"`{one.setting}` alone does not help"
            for one in self.tried
        ]
        return f"tried: {'; '.join(words)}" if words else ""
