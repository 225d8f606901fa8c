"""What a comparison of metrics found: a row for each metric and module, and why a metric went wrong."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from typing_extensions import final, override

from lightning_amp._text import named, rounded
from lightning_amp.findings._tried_remedy import TriedRemedy

LOADER_SUFFIX = "/dataloader_idx_"
"""What Lightning puts between the name of a metric and the number of its loader."""

_FEW_PERCENT = 0.05


@final
class ComparisonRow(NamedTuple):
    """One metric of one compared validation.

    `step` is the step that the loggers got. `diff` is AMP minus fp32, in the metric's own unit; `relative_diff` is
    `diff` over the magnitude of `fp32` (0 where both are 0, infinite where only `fp32` is).
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
        """Build a row from the two values."""
        # Equal infinities agree; their difference would be NaN.
        diff = 0.0 if amp == fp32 else amp - fp32
        if diff == 0.0:
            relative_diff = 0.0
        elif fp32 == 0.0:
            relative_diff = math.nan if math.isnan(diff) else math.copysign(math.inf, diff)
        else:
            relative_diff = diff / abs(fp32)
        return cls(epoch, step, metric, amp, fp32, diff, relative_diff)

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the two sides differ by more than `tolerance`: NaN on one side does, on both does not."""
        if math.isnan(self.amp) or math.isnan(self.fp32):
            return math.isnan(self.amp) != math.isnan(self.fp32)
        return abs(self.diff) > tolerance

    def stands_out(self, largest: float) -> bool:
        """Return whether AMP is not finite, or the two differ by more than a few per cent.

        Args:
            largest: Magnitude of the metric in fp32 so far: of a loss that has fallen far below it, little matters.
        """
        if not math.isfinite(self.amp):
            return True
        if not math.isfinite(self.fp32):
            return False
        return abs(self.diff) > max(_FEW_PERCENT * min(abs(self.amp), abs(self.fp32)), 0.005 * largest)

    def is_noise(self, num_rows: int) -> bool:
        """Return whether a share of samples, or a count of them, differs by less than two of its standard errors."""
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
        name: Qualified name.
        kind: Its class.
        num_calls: How often it ran.
        sqnr_db: Signal to noise of its outputs against fp32; 6 dB are one correct bit. NaN if one is not finite.
        varying_sqnr_db: The same of what differs between the samples of a batch, that is after subtraction of their
            mean: in `x + 1000` little of the whole is wrong in bfloat16, and most of what matters.
        cosine: Between the two; NaN if one is not finite.
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

_ZERO_DIVISOR = "a divisor that is 0"
_LOOK_FOR = {
    "truediv": _ZERO_DIVISOR,
    "div": _ZERO_DIVISOR,
    "itruediv": _ZERO_DIVISOR,
    "rtruediv": _ZERO_DIVISOR,
    "reciprocal": _ZERO_DIVISOR,
    "softmax": "a row that is masked entirely",
    "log_softmax": "a row that is masked entirely",
    "scaled_dot_product_attention": "a row that is masked entirely",
    "log": "a value of 0 or below",
    "sqrt": "a value below 0",
    "rsqrt": "a value of 0 or below",
    "exp": "a value above 88, beyond which `exp` leaves float32",
    "mean": "a mean over no values",
    "multi_head_attention_forward": "a row that is masked entirely",
    "cross_entropy": "a batch whose labels are all left out (`ignore_index`)",
}


@final
@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Why a metric is not finite, or not what it is in fp32. Immutable.

    .. code-block:: python

        comparison = MetricComparison()
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison], max_epochs=1).fit(model, data)
        if comparison.report is not None:
            print(comparison.report)  # the text of the warning
            print(comparison.report.module, [tried.setting for tried in comparison.report.tried if tried.works])

    Attributes:
        metric: Its name in `trainer.callback_metrics`.
        amp: Over the whole validation.
        fp32: Likewise.
        cause: `"batch"`: the batch is not finite. `"weights"`: a parameter or buffer is not. `"module"`: the output of
            a module is wrong, and what went in was not. `"operation"`: one outside of all modules, in the step itself.
            `"state"`: what adds up from batch to batch in half precision. `"unknown"`: no batch shows it.
        epoch: `trainer.current_epoch`.
        rank: Of the process whose batch this is about.
        world_size: How many there are.
        loader_idx: Which loader; `None` with one.
        batch_idx: The first batch that shows it; `None` if no single one does.
        batch_amp: The metric over this batch alone.
        batch_fp32: Likewise.
        in_fp32_too: Whether it is not finite in fp32 either: no precision can help.
        names: With cause `"batch"`, `"weights"` or `"state"`: of what.
        module: Qualified name of the first module whose output is wrong.
        module_class: Its class.
        input_sqnr_db: What goes into it against fp32; infinite if that is the same.
        output_sqnr_db: What comes out of it; NaN if it is not finite.
        operation: The operation, if it is known: `"cos"`.
        place: The line of the user's code that calls it.
        tried: What was tried, in this order.
        note: Why not more is known.

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

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)

    @override
    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.world_size > 1 else ""
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
                return f"not finite are {named(self.names)}{reached}"
            case "state":
                return f"what adds up over the batches in half precision: {', '.join(self.names)}"
            case "module":
                return f"the output of `{self.module}` ({self.module_class}) {self._noise()}{too}"
            case "operation":
                before = "" if self.in_fp32_too else "all modules give what they give in fp32; "
                return f"{before}what the step computes outside of all modules {self._noise()}{too}"
            case "unknown":
                return "not found"

    def _noise(self) -> str:
        if math.isnan(self.output_sqnr_db):
            return "is not finite, although what goes into it is"
        before = "is exact" if math.isinf(self.input_sqnr_db) else f"has {self.input_sqnr_db:.0f}"
        return f"is wrong: it has {self.output_sqnr_db:.0f} dB of SQNR against fp32, and what goes into it {before}"

    def _advice(self) -> str:
        if self.cause == "batch":
            return "try: clean the data, or leave these rows out of the metric; no precision can help"
        if self.cause == "weights":
            return "try: a checkpoint from before it; in fp32 it is the same, no precision can help"
        if self.in_fp32_too:
            what = _LOOK_FOR.get(self.operation)
            where = f"look for {what}" if what else "look at what goes into it"
            return f"try: no precision can help, for this is so in fp32, too; {where}"
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
