"""What one run of a comparison left: one arm, trained once with one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from typing_extensions import final

from lightning_amp.scaling import StepRecord


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
        precision: What the plugin settled on: `"fp16"`, `"bf16-mixed"`.
        device: Where it ran: `"cpu: AMD EPYC"`.
        tf32: Whether fp32 matrix products were allowed to use TF32.
        versions: Of torch, lightning, lightning_amp, Python.
        curves: Each validation metric, a point for each validation; the sanity check is none.
        directions: `"min"` or `"max"`, where a torchmetrics metric says which is better.
        loss: Of training; at most some hundreds of points.
        same_weights: Each metric of the last compared validation, as (mixed precision, fp32).
        step_s: Seconds per training step, of steady steps only.
        samples_per_s: Likewise; empty if the size of a batch is unknown.
        num_unsteady: Training steps that are left out of `step_s`: first ones, and those after a pause.
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
    directions: Mapping[str, str] = field(default_factory=dict)
    loss: tuple[Point, ...] = ()
    same_weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    step_s: tuple[float, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    num_unsteady: int = 0
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

    def to_data(self) -> dict[str, Any]:
        """Return what :func:`json.dumps` takes; NaN and infinities as text, since JSON has none."""
        data = {name: getattr(self, name) for name in _NAMES}
        data["scale"] = [asdict(record) for record in self.scale]
        return plain(data)

    @classmethod
    def from_data(cls, data: object) -> ArmRun:
        """Read what :meth:`to_data` returned.

        Raises:
            ValueError: If it is something else.

        """
        if not isinstance(data, Mapping) or not set(_NAMES) <= data.keys():
            raise ValueError(f"A run has the keys {list(_NAMES)}; got {type(data).__name__} {str(data)[:80]!r}.")
        found = dict(data)
        try:
            return cls(
                **{name: found[name] for name in _AS_THEY_ARE},
                curves={name: _points(points) for name, points in found["curves"].items()},
                loss=_points(found["loss"]),
                same_weights={n: (number(amp), number(fp32)) for n, (amp, fp32) in found["same_weights"].items()},
                step_s=tuple(map(number, found["step_s"])),
                samples_per_s=tuple(map(number, found["samples_per_s"])),
                scale=tuple(StepRecord(**record) for record in found["scale"]),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"This is not a run of a comparison: {error}.") from error


_NAMES = tuple(f.name for f in fields(ArmRun))
_CONVERTED = {"curves", "loss", "same_weights", "step_s", "samples_per_s", "scale"}
_AS_THEY_ARE = tuple(name for name in _NAMES if name not in _CONVERTED)


def _points(rows: Sequence[Any]) -> tuple[Point, ...]:
    return tuple(Point(int(step), number(train_s), number(value)) for step, train_s, value in rows)


def number(value: Any) -> float:
    """Read a number that :func:`plain` wrote: `"nan"`, `"inf"`, `"-inf"` are text in JSON."""
    if isinstance(value, str) and value not in {"nan", "inf", "-inf"}:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def plain(value: Any) -> Any:
    """Return plain data of JSON, in which a number that is not finite is a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
