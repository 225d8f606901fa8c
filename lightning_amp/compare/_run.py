"""The record of one run of a comparison: one arm, trained once with one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from typing_extensions import final

from lightning_amp._plain_data import plain
from lightning_amp.compare import _fields
from lightning_amp.compare._statistics import Direction
from lightning_amp.findings import StepRecord
from lightning_amp.measure import MemoryOf


@final
class Point(NamedTuple):
    """One value of a curve.

    `step` is the number of training batches so far. `train_s` is the time spent in training so far, in seconds: without
    validation, and without the measurements of the comparison.
    """

    step: int
    train_s: float
    value: float


@final
@dataclass(frozen=True)
class ArmRun:
    """The measurements of one training, as numbers and texts that fit into a JSON file.

    A run that failed has an `error`, and the values that were known before it failed.

    Attributes:
        label: The label of the arm.
        seed: The seed of the run.
        error: The exception that ended the run, or the signal that killed its process. `None` if it finished.
        precision: The precision that the plugin chose: `"fp16"`, `"bf16-mixed"`.
        device: Where it ran: `"cpu (AMD EPYC)"`.
        devices: The devices that it computed on, as the host tells them apart: `("cuda:GPU-7f3a...",)`; `("cpu",)`.
        host: The name of the machine.
        num_threads: Number of threads of an operation on the CPU.
        started_at: When its process was started, by the clock of the host: seconds since 1970.
        ended_at: When its process had ended.
        killed_by: The signal that killed its process: `"SIGKILL"`.
        first_attempt: How the first attempt was lost, if the run was repeated because its worker died.
        tf32: Whether fp32 matrix products were allowed to use TF32.
        versions: Versions of torch, lightning, lightning_amp and Python.
        curves: Each validation metric, with a point for each validation that logged it. The sanity check is left out.
        last_validation: The step of the last validation, as in `Point`.
        directions: `"min"` or `"max"` for each metric whose better direction torchmetrics defines.
        loss: The training loss; a few hundred points at most.
        same_weights: Each metric of the last validation that was compared with fp32, as (mixed precision, fp32).
        step_s: Seconds per training step. Only steady steps count: not the first ones, none after a pause.
        timed_steps: The numbers of the training steps in `step_s`, from 0 on; empty if they are consecutive.
        samples_per_s: Samples per second in the same steps; empty if the batch size is unknown.
        train_s: Seconds of the whole training, as in `Point`.
        total_s: Seconds from the start of the process to its end.
        peak_memory_bytes: The most memory that training held at once; `None` if unknown.
        memory_of: The source of that number: `"device"`, its own allocator, or `"tensors"`, on the CPU.
        num_steps: Number of optimizer steps applied.
        num_skipped: Number of optimizer steps skipped.
        scale: Changes of the loss scale and skips, as a :class:`ScaleHistory` stores them; empty without loss scaling.
        matmul_flops: Each dtype's share in the FLOPs of matrix products in a training step: `{"float16": 0.98, ...}`.
        log: The last lines that the process printed, if the run failed.

    """

    label: str
    seed: int
    error: str | None = None
    precision: str = ""
    device: str = ""
    devices: tuple[str, ...] = ()
    host: str = ""
    num_threads: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    killed_by: str | None = None
    first_attempt: str = ""
    tf32: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    last_validation: int = 0
    directions: Mapping[str, Direction] = field(default_factory=dict)
    loss: tuple[Point, ...] = ()
    same_weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    step_s: tuple[float, ...] = ()
    timed_steps: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    train_s: float = 0.0
    total_s: float = 0.0
    peak_memory_bytes: int | None = None
    memory_of: MemoryOf | None = None
    num_steps: int = 0
    num_skipped: int = 0
    scale: tuple[StepRecord, ...] = ()
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    log: str = ""

    @property
    def finished(self) -> bool:
        """Return whether the run trained to its end."""
        return self.error is None

    def seconds_of_steps(self) -> dict[int, float]:
        """Return the seconds of each steady step, by its number."""
        numbers = self.timed_steps or range(len(self.step_s))
        return {step: time for step, time in zip(numbers, self.step_s, strict=True) if 0 < time < math.inf}

    def to_data(self) -> dict[str, Any]:
        """Return data for :func:`json.dumps`; NaN and infinities are texts, because JSON has neither."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["scale"] = [asdict(record) for record in self.scale]
        return plain(data)

    @classmethod
    def from_data(cls, data: object) -> ArmRun:
        """Read data that :meth:`to_data` returned.

        Raises:
            ValueError: If the data is something else.

        """
        run = _fields.read(cls, data, "a run of a comparison")
        if run.timed_steps and len(run.timed_steps) != len(run.step_s):
            raise ValueError("this is not a run of a comparison: `timed_steps` and `step_s` differ in length")
        return run
