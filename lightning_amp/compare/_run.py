"""The records of a comparison that fit into a JSON file: its plan, and the measurements of each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from typing_extensions import final

from lightning_amp._plain_data import plain
from lightning_amp.compare._stats import Direction
from lightning_amp.findings import StepRecord
from lightning_amp.measure import MemoryOf

CONTROL = "control"
"""The label of the control: the reference, trained with initial weights moved in their last bit."""

_T = TypeVar("_T")


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
class Run:
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
        tf32: Whether fp32 matrix products were allowed to use TF32.
        versions: Versions of torch, lightning, lightning_amp and Python.
        curves: Each validation metric, with a point for each validation that logged it. The sanity check is left out.
        last_validation: The step of the last validation, as in `Point`.
        directions: `"min"` or `"max"` for each metric whose better direction torchmetrics defines.
        loss: The training loss; a few hundred points at most.
        same_weights: Each metric of the last validation that was compared with fp32, as (mixed precision, fp32).
        step_s: Seconds per training step. Only steady steps count: not the first ones, none after a pause.
        timed_steps: The numbers of the training steps in `step_s`, from 0 on.
        samples_per_s: Samples per second in the same steps; empty if the batch size is unknown.
        train_s: Seconds of the whole training, as in `Point`.
        total_s: Seconds from the start of the process to its end.
        peak_memory_bytes: The most memory that training held at once; `None` if unknown.
        memory_of: The source of that number: `"device"`, its own allocator, or `"tensors"`, on the CPU.
        num_steps: Number of optimizer steps applied.
        num_skipped: Number of optimizer steps skipped.
        scale: Changes of the loss scale and skips, as a scale history stores them; empty without loss scaling.
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
    def name(self) -> str:
        """Return its name for people: `bf16, seed 0`."""
        return f"{self.label}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Return whether the run trained to its end."""
        return self.error is None

    def seconds_of_steps(self) -> dict[int, float]:
        """Return the seconds of each steady step, by its number."""
        steps = zip(self.timed_steps, self.step_s, strict=False)
        return {step: time for step, time in steps if 0 < time < math.inf}

    def shared_a_device(self, others: Iterator[Run] | list[Run]) -> bool:
        """Return whether another run was on one of its devices at the same time, by the clock of their host."""
        return any(
            other is not self
            and self.host == other.host != ""
            and not set(self.devices).isdisjoint(other.devices)
            and self.started_at < other.ended_at
            and other.started_at < self.ended_at
            for other in others
        )


@final
class Margin(NamedTuple):
    """The cost that a precision may have in one metric, in the metric's own unit.

    `direction` is `"min"` or `"max"` if the user gave it.
    """

    value: float
    direction: Direction | None = None


@final
@dataclass(frozen=True)
class Plan:
    """A comparison before anything has run.

    Attributes:
        make_module: Name of the factory, as a person would write it: `Net`, `make_net`, `Net(width=64)`.
        make_data: Name of the other factory.
        arms: The plugin of each label: `{"fp16, small scale": "AmpPrecision('fp16', scaler=256.0)"}`. The first arm is
            the reference; the control is not among them.
        trainer_kwargs: Each argument of the Trainer as a text.
        seed: The first seed.
        num_seeds: Number of seeds.
        control: Whether there is a control.
        margins: By metric.

    """

    make_module: str
    make_data: str
    arms: Mapping[str, str]
    trainer_kwargs: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    num_seeds: int = 1
    control: bool = False
    margins: Mapping[str, Margin] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Return the label of the first arm."""
        return next(iter(self.arms))

    @property
    def labels(self) -> list[str]:
        """Return all labels, the control last."""
        return [*self.arms, CONTROL] if self.control else list(self.arms)

    @property
    def seeds(self) -> range:
        """Return the seeds of each arm."""
        return range(self.seed, self.seed + self.num_seeds)

    def runs(self) -> Iterator[tuple[str, int]]:
        """Iterate over label and seed in the order in which they run: all arms of a seed, then the next seed.

        Every second seed runs its arms in reverse order. So a machine that becomes slower does not always slow down the
        same arm.
        """
        for index, seed in enumerate(self.seeds):
            yield from ((label, seed) for label in self.labels[:: -1 if index % 2 else 1])


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_data(record: Plan | Run) -> dict[str, Any]:
    """Return data for :func:`json.dumps`; NaN and infinities are texts, because JSON has neither."""
    return plain(asdict(record))


def from_data(kind: type[_T], data: object) -> _T:
    """Read data that :func:`to_data` returned. Unknown names are ignored.

    Raises:
        ValueError: If the data is something else.

    """
    try:
        return _read(kind, data)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"this is no {kind.__name__.lower()} of a comparison: {error!r}") from error


def _read(hint: Any, value: Any) -> Any:
    """Return a value of an annotated type: a dataclass, a text, a number, a literal, or mappings and tuples of them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if type(None) in arguments:  # `X | None`
        return None if value is None else _read(arguments[0], value)
    if origin is Mapping:
        return {str(name): _read(arguments[1], item) for name, item in value.items()}
    if origin is Literal:
        return arguments[arguments.index(value)]
    if origin is tuple and arguments[-1] is ...:
        return tuple(_read(arguments[0], item) for item in value)
    if origin is tuple:
        return tuple(_read(kind, item) for kind, item in zip(arguments, value, strict=True))
    hints, made = get_type_hints(hint), hint
    if is_dataclass(hint):
        return made(**{name: _read(kind, value[name]) for name, kind in hints.items()})
    if hasattr(hint, "_fields"):  # a `NamedTuple`
        return hint(*(_read(kind, item) for kind, item in zip(hints.values(), value, strict=True)))
    if isinstance(value, str) and hint is not str and value not in ("nan", "inf", "-inf"):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return hint(value)
