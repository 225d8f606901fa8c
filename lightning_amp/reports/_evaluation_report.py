"""What `MetricComparison` found out about a metric that mixed precision changes, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._text import named, rounded

Cause = Literal["batch", "weights", "module", "operation", "state", "unknown"]

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
class TriedRemedy:
    """A setting that was tried on the batch in a replay.

    Attributes:
        setting: As it stands in code: `fp32_modules=['rotary']`.
        value: Of the metric with it; NaN if it could not be tried.
        works: Whether the difference to fp32 is gone, by three quarters at least.

    """

    setting: str
    value: float
    works: bool


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
    cause: Cause = "unknown"
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

    def over(self, amp: float, fp32: float) -> EvaluationReport:
        """Return it with other values of the whole validation."""
        return replace(self, amp=amp, fp32=fp32)

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
        lines += [f"  {line}" for line in self._advice()]
        return "\n".join(lines)

    def _cause(self) -> str:
        too = ", in fp32 too" if self.in_fp32_too else ""
        if self.cause == "batch":
            reached = f"; they first reach `{self.module}` ({self.module_class})" if self.module else ""
            return f"the batch itself has values that are not finite ({', '.join(self.names)}){reached}"
        if self.cause == "weights":
            reached = f"; they first reach `{self.module}` ({self.module_class})" if self.module else ""
            return f"not finite are {named(self.names)}{reached}"
        if self.cause == "state":
            return f"what adds up over the batches in half precision: {', '.join(self.names)}"
        if self.cause == "module":
            return f"the output of {self._module()} {self._noise()}{too}"
        if self.cause == "operation":
            before = "" if self.in_fp32_too else "all modules give what they give in fp32; "
            return f"{before}what the step computes outside of all modules {self._noise()}{too}"
        return "not found"

    def _module(self) -> str:
        return f"`{self.module}` ({self.module_class})" if self.module else f"`{self.module_class}`"

    def _noise(self) -> str:
        if math.isnan(self.output_sqnr_db):
            return "is not finite, although what goes into it is"
        before = "is exact" if math.isinf(self.input_sqnr_db) else f"has {self.input_sqnr_db:.0f}"
        return f"is wrong: it has {self.output_sqnr_db:.0f} dB of SQNR against fp32, and what goes into it {before}"

    def _advice(self) -> list[str]:
        if self.cause == "batch":
            return ["try: clean the data, or leave these rows out of the metric; no precision can help"]
        if self.cause == "weights":
            return ["try: a checkpoint from before it; in fp32 it is the same, no precision can help"]
        if self.in_fp32_too:
            what = _LOOK_FOR.get(self.operation)
            where = f"look for {what}" if what else "look at what goes into it"
            return [f"try: no precision can help, for this is so in fp32, too; {where}"]
        if self.cause == "state":
            works = next((one for one in self.tried if one.works), None)
            return (
                [] if works is None else [f"tried: in float32 it works: {rounded(works.value)} over the same batches"]
            )
        words = [
            f"`{one.setting}` works: {rounded(one.value)} on this batch"
            if one.works
            else f"`{one.setting}` alone does not help"
            for one in self.tried
        ]
        return [f"tried: {'; '.join(words)}"] if words else []
