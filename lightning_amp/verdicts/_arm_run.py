"""What one run of a comparison left: one arm, trained once with one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, get_args

from typing_extensions import final

from lightning_amp._plain_data import plain
from lightning_amp.findings import StepPrecision, StepRecord, fallbacks
from lightning_amp.verdicts import _fields


@final
class Point(NamedTuple):
    """One value of a curve.

    `step` counts training batches so far; `train_s` are the seconds spent in training until then: from the first batch
    on, without validation, and without what is measured beside it.
    """

    step: int
    train_s: float
    value: float


@final
@dataclass(frozen=True)
class ArmRun:
    """Numbers only, so that they are a JSON file: of a run that failed, `error` and what was known before it ran.

    Attributes:
        label: Of the arm.
        seed: Of the run.
        error: What ended it: the exception, or the signal that killed its process. `None` if it finished.
        precision: What the plugin settled on: `"fp16"`, `"bf16-mixed"`; `"fp16, bf16 from step 64 on"` if
            the run was stuck and fell back.
        device: Where it ran: `"cpu: AMD EPYC"`.
        tf32: Whether fp32 matrix products were allowed to use TF32.
        versions: Of torch, lightning, lightning_amp, Python.
        curves: Each validation metric, a point for each validation that logged it; the sanity check is none.
        last_validation: The step of the last validation, as in `Point`.
        directions: `"min"` or `"max"`, where a torchmetrics metric says which is better.
        loss: Of training; at most some hundreds of points.
        same_weights: Each metric of the last compared validation, as (mixed precision, fp32).
        step_s: Seconds per training step, of steady steps only: not the first ones, none after a pause.
        timed_steps: Which training steps `step_s` times, counted from 0; empty for consecutive ones.
        samples_per_s: Of the same steps; empty if the size of a batch is unknown.
        train_s: All of training, as in `Point`.
        startup_s: From the start of the process to the first batch: imports, the factories, the data.
        total_s: From the start of the process to its end.
        peak_memory_bytes: The most that training held at once; `None` if unknown.
        memory_of: Whose memory that is: `"device"`, by its own allocator, or `"tensors"`, on the CPU.
        num_steps: Optimizer steps applied.
        num_skipped: Optimizer steps skipped.
        scale: Changes of the loss scale and skips, as a :class:`ScaleHistory` stores them; empty without loss scaling.
        matmul_flops: Share of the FLOPs of matrix products by dtype, of one training step: `{"float16": 0.98, ...}`.
        log: The last lines of what the process printed, of a run that failed.

    """

    label: str
    seed: int
    error: str | None = None
    precision: str = ""
    device: str = ""
    tf32: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    last_validation: int = 0
    directions: Mapping[str, str] = field(default_factory=dict)
    loss: tuple[Point, ...] = ()
    same_weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    step_s: tuple[float, ...] = ()
    timed_steps: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    train_s: float = 0.0
    startup_s: float = 0.0
    total_s: float = 0.0
    peak_memory_bytes: int | None = None
    memory_of: str | None = None
    num_steps: int = 0
    num_skipped: int = 0
    scale: tuple[StepRecord, ...] = ()
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    log: str = ""

    @property
    def finished(self) -> bool:
        """Return whether it trained to its end."""
        return self.error is None

    @property
    def fell_back(self) -> bool:
        """Return whether it was stuck and went on in another precision."""
        return bool(fallbacks(self.scale))

    def seconds_of_steps(self) -> dict[int, float]:
        """Return the seconds of each steady step, by its number."""
        numbers = self.timed_steps or range(len(self.step_s))
        return {step: time for step, time in zip(numbers, self.step_s, strict=True) if 0 < time < math.inf}

    def to_data(self) -> dict[str, Any]:
        """Return what :func:`json.dumps` takes; NaN and infinities as text, since JSON has none."""
        data = {name: getattr(self, name) for name in _READERS}
        data["scale"] = [asdict(record) for record in self.scale]
        return plain(data)

    @classmethod
    def from_data(cls, data: object) -> ArmRun:
        """Read what :meth:`to_data` returned.

        Raises:
            ValueError: If it is something else.

        """
        run = cls(**_fields.read("a run of a comparison", _READERS, data))
        if run.timed_steps and len(run.timed_steps) != len(run.step_s):
            raise ValueError("this is not a run of a comparison: `timed_steps` and `step_s` differ in length")
        return run


def _point(data: object) -> Point:
    return Point(*_POINT(data))


def _step_record(data: object) -> StepRecord:
    if isinstance(data, Mapping):  # older files have no precision
        data = {"precision": "", **data}
    return StepRecord(**_fields.read("a step", _STEP_RECORD, data))


_POINT = _fields.row(_fields.count, _fields.number, _fields.number)
_STEP_RECORD: dict[str, _fields.Reader[Any]] = {
    "index": _fields.count,
    "optimizer_idx": _fields.count,
    "scale": _fields.number,
    "next_scale": _fields.number,
    "skipped": _fields.boolean,
    "reason": _fields.choice("none", "loss", "gradient"),
    "precision": _fields.choice(*get_args(StepPrecision)),
}
_READERS: dict[str, _fields.Reader[Any]] = {
    "label": _fields.text,
    "seed": _fields.count,
    "error": _fields.optional(_fields.text),
    "precision": _fields.text,
    "device": _fields.text,
    "tf32": _fields.boolean,
    "versions": _fields.by_name(_fields.text),
    "curves": _fields.by_name(_fields.several(_point)),
    "last_validation": _fields.count,
    "directions": _fields.by_name(_fields.choice("min", "max")),
    "loss": _fields.several(_point),
    "same_weights": _fields.by_name(_fields.row(_fields.number, _fields.number)),
    "step_s": _fields.several(_fields.number),
    "timed_steps": _fields.several(_fields.count),
    "samples_per_s": _fields.several(_fields.number),
    "train_s": _fields.number,
    "startup_s": _fields.number,
    "total_s": _fields.number,
    "peak_memory_bytes": _fields.optional(_fields.count),
    "memory_of": _fields.optional(_fields.choice("device", "tensors")),
    "num_steps": _fields.count,
    "num_skipped": _fields.count,
    "scale": _fields.several(_step_record),
    "matmul_flops": _fields.by_name(_fields.number),
    "log": _fields.text,
}
