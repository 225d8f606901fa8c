"""What was measured of a training step, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import final

from lightning_amp.measure import SpeedComparison


@final
@dataclass(frozen=True)
class Reason:
    """Why matrix products of one place ran in fp32.

    Attributes:
        why: `"autocast off"`, `"fp32_modules"`, `"not on autocast's list"`, `"attention in fp32"` or `"float64"`.
        where: A module, or a line of code.
        flops: How many, in the forward.

    """

    why: str
    where: str
    flops: int


@final
@dataclass(frozen=True)
class Unaligned:
    """A matrix product with sizes that are no multiples of what the device likes.

    Attributes:
        sizes: Rows, depth, columns.
        padded: The next multiples.
        module: Where.
        count: How often in a step, forward and backward.
        flops: Of all of them.
        seconds: Measured, of all of them.
        padded_seconds: Measured, of all of them with padded sizes.
        padded_speed: How much faster one is with padded sizes; `None` if it was not measured.

    """

    sizes: tuple[int, int, int]
    padded: tuple[int, int, int]
    module: str
    count: int
    flops: int
    seconds: float
    padded_seconds: float
    padded_speed: SpeedComparison | None = None


@final
@dataclass(frozen=True)
class SlowProduct:
    """Matrix products of one place that take longer than in fp32.

    Attributes:
        where: A module, or `"backward"`.
        operation: As in `aten`.
        seconds: Of a step.
        fp32_s: Of a step in fp32.

    """

    where: str
    operation: str
    seconds: float
    fp32_s: float


@final
@dataclass(frozen=True)
class CastSite:
    """Casts between floating-point formats that one line, or one weight, causes.

    Attributes:
        kind: `"explicit"` (`.float()`, `.to(...)`, ...), `"weight again"` (one that was cast in this step before),
            `"weight"` (autocast's own one) or `"activation"` (autocast's own).
        where: A line of code with its file, or a module.
        count: How many in a step.
        num_bytes: That they write.
        seconds: That they take.

    """

    kind: str
    where: str
    count: int
    num_bytes: int
    seconds: float


@final
@dataclass(frozen=True)
class Wait:
    """Where the host reads a value from the device, and so waits for it.

    Attributes:
        where: The line of code with its file.
        operation: What was called.
        count: How many in a step.
        by_user: Whether the line is the user's, and not one of Lightning or of this package.

    """

    where: str
    operation: str
    count: int
    by_user: bool = True


@final
@dataclass(frozen=True)
class Variant:
    """A training step as it is, or with something changed, timed beside the others.

    Attributes:
        label: `"as it is"`, `"fp32"`, or what was changed.
        step_s: Seconds of its steps, data loading excluded; of each round one median.
        error: What it ended with; empty if nothing.

    """

    label: str
    step_s: tuple[float, ...] = ()
    error: str = ""


@final
@dataclass(frozen=True)
class Memory:
    """What tensors hold in a training step, in bytes, at its peak.

    Attributes:
        weights: Parameters and buffers.
        gradients: Of parameters.
        states: Of optimizers.
        activations: Kept for the backward, and whatever else is there at the peak, but for the next three.
        logits: Of the inputs of a loss over classes: in half precision, in fp32, and their gradients.
        casts: Copies in another format.
        temporaries: Of the step of an optimizer.
        peak: All together.
        of_batch: The most that activations, logits and casts hold at once, which need not be at the peak.

    """

    weights: int
    gradients: int
    states: int
    activations: int
    logits: int
    casts: int
    temporaries: int
    peak: int
    of_batch: int


@final
@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer.

    Attributes:
        name: Its class.
        fused: Whether its step is one kernel.
        can_fuse: Whether it takes `fused=True` for these parameters.
        bytes_per_parameter: Of its states.
        num_parameters: That it trains.

    """

    name: str
    fused: bool
    can_fuse: bool
    bytes_per_parameter: float
    num_parameters: int


@final
@dataclass(frozen=True)
class Loading:
    """How batches are loaded.

    Attributes:
        workers: Processes.
        wait_s: Seconds that a step waits for its batch.
        restart_s: Of them, those in which the loader began an epoch.
        persistent: Whether its processes stay from epoch to epoch.
        tried: With how many processes the loader was tried alone, and seconds per batch then. Of a stream only numbers
            of processes that serve each row once.
        is_stream: Whether it reads an `IterableDataset`, each of whose processes may serve every row.

    """

    workers: int
    wait_s: float
    restart_s: float = 0.0
    persistent: bool = False
    tried: tuple[tuple[int, float], ...] = ()
    is_stream: bool = False


@final
@dataclass(frozen=True)
class Step:
    """What one training step of a module does, and what it costs.

    Attributes:
        precision: As :class:`AmpPrecision` names it.
        plugin: The line of code that makes the plugin.
        batch_size: Rows of a batch; 0 if unknown.
        num_parameters: Of the module.
        parts: Mean seconds of a step by part: `"data"`, `"forward"`, `"backward"`,
            `"checks, unscaling and clipping"`, `"optimizer"`, `"callbacks"`, `"rest"`.
        num_timed: How many steps `parts` are of.
        callbacks: Mean seconds of a step by callback.
        loading: How batches are loaded; `None` if that is not a plain `DataLoader`.
        flops: Of matrix products, by the name of the dtype.
        module_flops: Of the forward, by module and the name of the dtype.
        product_s: Seconds in matrix products; of the recorded step.
        fp32_product_share: The share of a step in fp32 that matrix products take and that half precision could reduce.
        slower: Products that take longer than in fp32, those that lose most first.
        recorded_s: Seconds in all operations of the recorded step.
        reasons: Why products ran in fp32, the most FLOPs first.
        unaligned: Products whose sizes are not aligned, the most FLOPs first.
        alignment: The multiple that sizes should have.
        casts: By place, those that take longest first.
        waits: By place.
        variants: Timed in turns, in pairs.
        memory: At the peak, and of the step in fp32.
        fp32_memory: The same of the step in fp32; `None` if it could not be run.
        logits: What the loss over classes is of: rows, classes; `None` if there is none.
        optimizers: What trains.
        convolutions: FLOPs of convolutions over two or three dimensions, in any format.
        channels_last: Whether they are given channels_last.
        settings: Settings of the process that cost time: anomaly detection, deterministic algorithms.
        fp32_modules: The rules of the plugin.
        skipped: How many of the steps were skipped while the loss scale settled.
        notes: What could not be measured, and why.

    """

    precision: str
    plugin: str
    batch_size: int
    num_parameters: int
    parts: Mapping[str, float]
    num_timed: int
    callbacks: Mapping[str, float]
    loading: Loading | None
    flops: Mapping[str, int]
    module_flops: Mapping[str, Mapping[str, int]]
    product_s: float
    fp32_product_share: float
    slower: tuple[SlowProduct, ...]
    recorded_s: float
    reasons: tuple[Reason, ...]
    unaligned: tuple[Unaligned, ...]
    alignment: int
    casts: tuple[CastSite, ...]
    waits: tuple[Wait, ...]
    variants: tuple[Variant, ...]
    memory: Memory
    fp32_memory: Memory | None
    logits: tuple[int, int] | None
    optimizers: tuple[OptimizerFacts, ...]
    convolutions: int
    channels_last: bool
    settings: tuple[str, ...] = ()
    fp32_modules: tuple[str, ...] = ()
    skipped: int = 0
    notes: tuple[str, ...] = field(default=())

    def variant(self, label: str) -> Variant | None:
        """Return a variant that was timed; `None` if it was not, or failed."""
        return next((v for v in self.variants if v.label == label and v.step_s), None)
