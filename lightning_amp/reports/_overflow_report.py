"""What `OverflowLocator` found out about one skipped step, for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._text import exact, named, rounded
from lightning_amp.numerics import fitting_scale
from lightning_amp.scaling import StepRecord
from lightning_amp.tracing import Diagnosis

Cause = Literal["batch", "weights", "forward", "loss", "backward", "not reproduced"]


@final
@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One skipped step. Immutable.

    .. code-block:: python

        locator = OverflowLocator()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[locator], max_epochs=1).fit(model, data)
        report = locator.reports[0]
        print(report)  # the text that was logged
        print(report.cause, report.diagnosis.module, report.parameters)

    Attributes:
        record: The skipped step: index, optimizer, scale, reason.
        rank: Of the process whose batch this report is about.
        world_size: How many there are.
        epoch: Where it happened.
        batch_idx: The batch whose replay failed; the last one of the window if none did.
        window: First and last batch since the last attempted step: the same without accumulation.
        num_replayed: How many batches of the window were run again, from its end.
        cause: As in :class:`~lightning_amp.tracing.Diagnosis`; `"not reproduced"` if every replay was finite.
        diagnosis: Module, tensor and magnitudes.
        parameters: Names of all parameters whose gradients were not finite.
        largest_gradient: With cause `"backward"` the largest true gradient of the batch, computed in fp32.
        note: Why the replay may not be exact, or why there was none; empty if all is well.
        precision: Of the run: `"16-mixed"`, `"bf16-mixed"`, `"32-true"`; empty in reports of older checkpoints.
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

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """Return the report that :meth:`as_dict` was made of; lists, as in JSON, are fine for its tuples."""
        found = dict(values["diagnosis"])
        shape = found["shape"]
        found["shape"] = None if shape is None else tuple(shape)
        found["entries"] = tuple((path, count) for path, count in found["entries"])
        own: dict[str, Any] = dict(values)
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
        rank = f", rank {self.rank}" if self.world_size > 1 else ""
        lines = [
            f"step {self.record.index} was skipped: epoch {self.epoch}, {where}{rank}, loss scale"
            f" {exact(self.record.scale)}",
            f"  cause: {self._cause()}",
        ]
        if self.parameters:
            lines.append(f"  non-finite gradients: {named(self.parameters)}")
        if self.note:
            lines.append(f"  note: {self.note}")
        if self._was_replayed:
            lines.append(f"  try: {self._advice()}")
        return "\n".join(lines)

    @property
    def _was_replayed(self) -> bool:
        return self.cause != "not reproduced" or self.num_replayed > 0

    def _module(self) -> str:
        found = self.diagnosis
        return f"`{found.module}` ({found.module_class})" if found.module else f"`{found.module_class}`"

    def _tensor(self) -> str:
        found = self.diagnosis
        return f"{found.dtype} {list(found.shape or ())}"

    def _magnitudes(self) -> str:
        found = self.diagnosis
        parts: list[str] = []
        if found.largest_input is not None:
            parts.append(f"the largest finite input is {rounded(found.largest_input)}")
        if found.largest_weight is not None:
            parts.append(f"the largest finite weight {rounded(found.largest_weight)}")
        return " and ".join(parts)

    def _cause(self) -> str:
        found = self.diagnosis
        if self.cause == "batch":
            entries = ", ".join(f"{count} in `batch{path}`" for path, count in found.entries)
            reached = f"; they first reach {self._module()}" if found.module is not None else ""
            return f"the batch itself has non-finite values ({entries}){reached}"
        if self.cause == "weights":
            return f"the parameter `{found.parameter}` has non-finite values; they first reach {self._module()}"
        if self.cause == "forward" and found.where == "input":
            return (
                f"the forward: what arrives at {self._module()} is not finite although every module before it and the"
                " batch are; an operation between modules overflowed"
            )
        if self.cause == "forward":
            return f"the forward: the output of {self._module()}, {self._tensor()}, is not finite; {self._magnitudes()}"
        if self.cause == "loss":
            return "the loss: every module's output is finite, what `training_step` computes from them is not"
        if self.cause == "backward":
            scaled = "" if self.record.scale == 1 else "scaled "
            return f"the {scaled}backward alone, the loss is finite: {self._backward()}"
        if not self._was_replayed:
            return "not looked for"
        where = f", on all of {self.world_size} ranks" if self.world_size > 1 else ""
        return f"not found: every replay of the batch was finite, forward and backward{where}"

    def _backward(self) -> str:
        found = self.diagnosis
        if found.where == "parameter":
            text = f"the gradient of `{found.parameter}`, in the backward of {self._module()}"
        elif found.where == "input":
            text = f"the gradient that the backward of {self._module()} computes for its input"
        else:
            text = f"the gradient that arrives at the output of {self._module()}"
        return f"{text}, {self._tensor()}, is not finite"

    def _advice_on_scale(self) -> str:
        epsilons = "an epsilon under roots, logarithms and quotients"
        if self.largest_gradient is None:
            return "'bf16', whose range is that of fp32"
        if not math.isfinite(self.largest_gradient):
            return (
                f"{epsilons}, whose derivatives at 0 are not finite: in fp32 the gradients of this batch are not finite"
                " either, so no precision can help"
            )
        size = f"the largest true gradient of this batch is {rounded(self.largest_gradient)}"
        if self._has_range_of_fp32:
            return (
                f"{epsilons}, or what computes their arguments in fp32 (`fp32_modules`): {size} in fp32, where nothing"
                " is rounded to zero before it"
            )
        scale = fitting_scale(self.largest_gradient, spare_bits=0, lowest=-126)
        falls = self.record.next_scale < self.record.scale
        if scale >= self.record.scale:
            first = "nothing, if it happens now and then: the scale falls; else " if falls else ""
            return (
                f"{first}'bf16', whose range is that of fp32: {size}, which fits; something on the way to it does not"
            )
        if scale < 1:
            divisor = 1 / fitting_scale(self.largest_gradient, lowest=-126)  # with room for other batches
            return (
                f"dividing the loss by a constant ({exact(divisor)} at least), or 'bf16': {size}, which does not fit"
                " into fp16 even without a loss scale"
            )
        if not falls:
            return (
                f"a loss scale of {exact(scale)} or below, or a dynamic one: {size}, and this scale did not fall (it is"
                " static, at its `min_scale`, or within its `hysteresis`)"
            )
        return (
            f"nothing, if it happens now and then: {size}, which fits at a scale of {exact(scale)}, and the scaler goes"
            " there by itself"
        )

    @property
    def _has_range_of_fp32(self) -> bool:
        return self.precision in ("bf16-mixed", "32-true")

    def _advice(self) -> str:
        if self.cause == "batch":
            return "clean the data, or leave this batch out; no precision can help"
        if self.cause == "weights":
            return "go back to a checkpoint from before it; no step can be taken with such a weight, in any precision"
        if self.cause == "forward" and (self._has_range_of_fp32 or self.diagnosis.dtype == "bfloat16"):
            return (
                "making what goes into the module smaller (a normalisation before it), and epsilons under roots,"
                " logarithms and quotients; 'fp32' holds no larger numbers than bfloat16"
            )
        if self.cause == "forward":
            return (
                "'bf16', whose range is that of fp32; or make what goes into the module smaller (a normalisation before"
                f" it); or keep it, and what takes its output, in fp32: `fp32_modules=[{self.diagnosis.module!r}, ...]`"
                ". Lowering the loss scale cannot help"
            )
        if self.cause == "loss":
            return (
                "compute the loss in fp32 (`.float()` on what goes into it) and in a stable form (`cross_entropy`,"
                " `logsumexp`, an epsilon under roots and quotients)"
            )
        if self.cause == "backward":
            return self._advice_on_scale()
        return (
            "look at what edits gradients between the backward and the step (hooks, callbacks), at non-deterministic"
            " operations, and at earlier batches of the window"
        )
