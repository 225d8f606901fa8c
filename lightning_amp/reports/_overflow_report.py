"""What `OverflowLocator` found out about one skipped step, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._plain_data import plain
from lightning_amp.findings import Remedy, StepRecord
from lightning_amp.reports._overflow_words import in_one_line, overflow_words
from lightning_amp.tracing import Diagnosis, Operation

Cause = Literal["batch", "weights", "forward", "loss", "backward", "not reproduced"]


@final
@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One skipped step. Immutable.

    .. code-block:: python

        locator = OverflowLocator()
        plugin = AmpPrecision("fp16", scaler=2.0**24)  # static, and too high
        L.Trainer(plugins=[plugin], callbacks=[locator], max_epochs=1).fit(model, data)
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
        remedies: What was tried in replays of the step, and whether it worked; empty if the cause was known.
        is_repeated: Whether an earlier report names the same cause, so that nothing was tried.
        largest_weights: Largest magnitude of a parameter at the start of the fit, and now.
        scale_is: Of the loss scale: `"dynamic"`, `"static"`, or `"lowest"` where it falls no further; empty without.
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
    scale_is: Literal["", "dynamic", "static", "lowest"] = ""

    @property
    def working_scale(self) -> float | None:
        """Return the loss scale at which a replay was finite; `None` if none was found, or tried."""
        return next((r.values[0] for r in self.remedies if r.kind == "scale" and r.worked), None)

    @property
    def in_one_line(self) -> str:
        """Return the cause, the line and what helps, in one line."""
        return in_one_line(self)

    @property
    def is_calibration(self) -> bool:
        """Return whether nothing is wrong: a dynamic scale was too high for a moment, and falls to one that works."""
        return self.cause == "backward" and self.scale_is == "dynamic" and self.working_scale is not None

    def as_dict(self) -> dict[str, Any]:
        """Return dictionaries, lists, texts and numbers, which a checkpoint may hold with `weights_only=True`."""
        return plain(asdict(self), float)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """Return the report that :meth:`as_dict` was made of; older versions kept tuples."""
        found = dict(values["diagnosis"])
        shape = found["shape"]
        found["shape"] = None if shape is None else tuple(shape)
        found["entries"] = tuple((path, count) for path, count in found["entries"])
        operation = found.get("operation")
        if operation is not None:
            lists: dict[str, Any] = {name: tuple(operation[name]) for name in ("shape", "index")}
            found["operation"] = Operation(**{**operation, **lists})
        own: dict[str, Any] = dict(values)
        remedies = values.get("remedies", ())
        own["remedies"] = tuple(Remedy(kind, tuple(inside), worked) for kind, inside, worked in remedies)
        weights = values.get("largest_weights")
        own["largest_weights"] = None if weights is None else tuple(weights)
        own["record"] = StepRecord(**values["record"])
        own["window"], own["parameters"] = tuple(values["window"]), tuple(values["parameters"])
        own["diagnosis"] = Diagnosis(**found)
        return cls(**own)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @override
    def __str__(self) -> str:
        return overflow_words(self)
