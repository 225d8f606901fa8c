"""The record of a training step: what was seen of it and measured. Each finding reads it and derives its own facts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._user_line import Place
from lightning_amp.measure import FORWARD, OPTIMIZER, SpeedComparison

Label = Literal["as it is", "fp32", "fused=True", "channels_last", "without fp32_modules", "4 times the batch"]
"""Of a step that is raced: what is different."""
AS_IT_IS: Label = "as it is"
IN_FP32: Label = "fp32"
FUSED: Label = "fused=True"
CHANNELS_LAST: Label = "channels_last"
WITHOUT_RULES: Label = "without fp32_modules"
LARGER_BATCH: Label = "4 times the batch"
TIMES_LARGER = 4

Setting = Literal["anomaly detection", "deterministic algorithms"]

_EMPTY = {"t", "view", "detach", "transpose", "expand", "slice", "select", "unsqueeze", "permute", "_unsafe_view"}
"""Operations that compute nothing: their time is that of a call."""


# -- one step, operation by operation ----------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class Operation:
    """One operation, below autograd and autocast. Its recorder fills it in as it runs.

    Attributes:
        name: As in `aten`.
        part: Of the step: `"forward"`, `"backward"`, `"optimizer"`, ...
        module: The innermost module whose forward was running; empty for the root, and outside of all.
        in_fp32_module: Whether a module of the plugin's `fp32_modules` was running.
        asked: The function of torch that was called: `"torch.nn.functional.linear"`; empty in a backward.
        autocast: Whether autocast was on where it was called.
        place: The line of the user that asked for it, where that matters.
        seconds: Of the host on a CPU, of the stream on CUDA.
        dtype: What a matrix product multiplies; empty for others.
        flops: Of a matrix product.
        sizes: Rows, depth and columns of a product of two matrices.
        is_convolution: Whether it is the forward of one, of two or three dimensions.
        channels_last: Whether the output of a convolution has the channels last.
        cast_bytes: What a cast between floating formats writes; 0 for others.
        cast_of: Which parameter such a cast reads, by its pointer; 0 if none.

    """

    name: str
    part: str
    module: str = ""
    in_fp32_module: bool = False
    asked: str = ""
    autocast: bool = False
    place: Place | None = None
    seconds: float = 0.0
    dtype: str = ""
    flops: int = 0
    sizes: tuple[int, int, int] | None = None
    is_convolution: bool = False
    channels_last: bool = False
    cast_bytes: int = 0
    cast_of: int = 0

    def took(self, seconds: float) -> None:
        """Note its time."""
        self.seconds = seconds

    def multiplied(self, dtype: str, flops: int, sizes: tuple[int, int, int] | None, place: Place | None) -> None:
        """Note that it is a matrix product."""
        self.dtype, self.flops, self.sizes, self.place = dtype, flops, sizes, place

    def convolved(self, *, channels_last: bool) -> None:
        """Note that it is a convolution."""
        self.is_convolution, self.channels_last = True, channels_last

    def casted(self, num_bytes: int, parameter: int, place: Place | None) -> None:
        """Note that it is a cast."""
        self.cast_bytes, self.cast_of, self.place = num_bytes, parameter, place


@final
@dataclass(slots=True)
class Allocation:
    """Memory of a tensor that an operation made.

    Attributes:
        begin: How many operations had run before; -1 for gradients that were left from the step before.
        end: How many had run when it was freed; `None` if it was there at the end.
        part: Of the step, in which it was made.
        is_cast: Whether it holds a copy in another format.

    """

    pointer: int
    num_bytes: int
    numel: int
    begin: int
    end: int | None = None
    part: str = ""
    is_cast: bool = False

    def freed(self, moment: int) -> None:
        """Note that it is gone."""
        self.end = moment


@final
class Loss(NamedTuple):
    """A softmax over classes, as the loss of a classifier or a language model begins with."""

    rows: int
    classes: int

    @property
    def numel(self) -> int:
        """Return the size of its input."""
        return self.rows * self.classes


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
class Recording:
    """One step, recorded.

    Attributes:
        operations: In their order.
        allocations: Memory that they made.
        losses: Softmaxes over classes.
        waits: Where the host waited, the most first.

    """

    operations: tuple[Operation, ...]
    allocations: tuple[Allocation, ...] = ()
    losses: tuple[Loss, ...] = ()
    waits: tuple[Wait, ...] = ()

    @cached_property
    def of_the_module(self) -> tuple[Operation, ...]:
        """Return the operations without those of optimizers: some multiply matrices, whatever the precision."""
        return tuple(operation for operation in self.operations if operation.part != OPTIMIZER)

    @cached_property
    def flops(self) -> dict[str, int]:
        """Return the FLOPs of matrix products by dtype, the most first."""
        found = Counter[str]()
        for operation in self.of_the_module:
            if operation.flops:
                found[operation.dtype] += operation.flops
        return dict(found.most_common())

    @cached_property
    def module_flops(self) -> dict[str, dict[str, int]]:
        """Return the FLOPs of the forward by module and dtype, the most first."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for operation in self.of_the_module:
            if operation.flops and operation.part == FORWARD:
                found[operation.module][operation.dtype] += operation.flops
        ordered = sorted(found.items(), key=lambda item: -sum(item[1].values()))
        return {name: dict(count.most_common()) for name, count in ordered}

    @cached_property
    def forward_flops(self) -> int:
        """Return the FLOPs of matrix products of the forward."""
        return sum(sum(by_dtype.values()) for by_dtype in self.module_flops.values())

    @cached_property
    def seconds(self) -> float:
        """Return the seconds in all operations, those of optimizers included."""
        return sum(operation.seconds for operation in self.operations)

    @cached_property
    def product_s(self) -> float:
        """Return the seconds in matrix products, but for what any call takes that computes nothing."""
        empty = [operation.seconds for operation in self.of_the_module if operation.name in _EMPTY]
        call_s = median(empty) if empty else 0.0
        return sum(max(0.0, operation.seconds - call_s) for operation in self.of_the_module if operation.flops)

    @cached_property
    def convolution_flops(self) -> int:
        """Return the FLOPs of convolutions over two or three dimensions, in any format."""
        return sum(operation.flops for operation in self.of_the_module if operation.is_convolution)

    @cached_property
    def channels_last(self) -> bool:
        """Return whether most of these convolutions give images whose channels are last."""
        last = [operation.flops for operation in self.of_the_module if operation.channels_last]
        return bool(self.convolution_flops) and sum(last) >= 0.5 * self.convolution_flops


# -- what was measured of several steps --------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Variant:
    """A training step as it is, or with something changed, timed beside the others.

    Attributes:
        label: What is different.
        step_s: Seconds of its steps, data loading excluded; of each round one median.
        error: What it ended with; empty if nothing.

    """

    label: Label
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
        can_fuse: Whether it takes `fused=True` for these parameters, and does not have it.
        num_parameters: That it trains.

    """

    name: str
    can_fuse: bool
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
class Unaligned:
    """A matrix product with sizes that are no multiples of what the device likes, timed with padding.

    Attributes:
        sizes: Rows, depth, columns.
        padded: The next multiples.
        module: The first one in whose forward it is.
        flops: Of all of them, forward and backward.
        seconds: Measured, of all of them.
        padded_seconds: Measured, of all of them with padded sizes.
        padded_speed: How much faster one is with padded sizes; `None` if it was not measured.

    """

    sizes: tuple[int, int, int]
    padded: tuple[int, int, int]
    module: str
    flops: int
    seconds: float = 0.0
    padded_seconds: float = 0.0
    padded_speed: SpeedComparison | None = None


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
        recorded: One step, operation by operation.
        fp32_recorded: The same in fp32; `None` if it could not be run.
        fp32_product_share: The share of a step in fp32 that matrix products take and that half precision could reduce.
        memory: At the peak.
        fp32_memory: The same of the step in fp32; `None` if it could not be run.
        optimizers: All that train.
        loading: How batches are loaded; `None` if that is not a plain `DataLoader`.
        unaligned: Products whose sizes are not aligned, the most FLOPs first.
        alignment: The multiple that sizes should have.
        variants: Timed in turns, in pairs.
        settings: Settings of the process that cost time.
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
    recorded: Recording
    fp32_recorded: Recording | None
    fp32_product_share: float
    memory: Memory
    fp32_memory: Memory | None
    optimizers: tuple[OptimizerFacts, ...]
    loading: Loading | None
    unaligned: tuple[Unaligned, ...]
    alignment: int
    variants: tuple[Variant, ...]
    settings: tuple[Setting, ...] = ()
    skipped: int = 0
    notes: tuple[str, ...] = ()

    def variant(self, label: Label) -> Variant | None:
        """Return a variant that was timed; `None` if it was not, or failed."""
        return next((v for v in self.variants if v.label == label and v.step_s), None)

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a step, data loading included."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Return which share of a step a part takes."""
        return self.parts.get(part, 0.0) / max(self.seconds, 1e-12)
