"""The record of a training step: all measurements of the step. Each finding derives its own facts from it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._user_line import Place
from lightning_amp.advice._machine import Sizes, compare
from lightning_amp.measure import SpeedComparison

DATA, FORWARD, BACKWARD, OPTIMIZER, REST = "data", "forward", "backward", "optimizer", "rest"
"""The parts of a step."""

Label = Literal["as it is", "fp32", "fused=True", "channels_last"]
"""The change in a variant of a step."""
AS_IT_IS: Label = "as it is"
IN_FP32: Label = "fp32"
FUSED: Label = "fused=True"
CHANNELS_LAST: Label = "channels_last"

_CHANGED: dict[Label, tuple[str, ...]] = {FUSED: (OPTIMIZER, REST), CHANNELS_LAST: (FORWARD, BACKWARD)}
"""The parts of a step that a change can make faster: a fused optimizer also takes over checks, in the rest."""

_EMPTY = {"t", "view", "detach", "transpose", "expand", "slice", "select", "unsqueeze", "permute", "_unsafe_view"}
"""Operations that compute nothing, so their time is the cost of any operation call."""


# -- one step, operation by operation ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, below autograd and autocast.

    Attributes:
        part: The part of the step: `"forward"`, `"backward"`, `"optimizer"`, ...
        module: The innermost module whose forward was running; the root module, and code outside of all, by its class.
        asked: The torch function that the caller used: `"torch.nn.functional.linear"`; empty in a backward.
        autocast: Whether autocast was on where that function was called.
        place: The user's line that caused a cast, or a product in fp32.
        dtype: The dtype that a matrix product multiplies; empty for other operations.
        sizes: Rows, depth and columns of a product of two matrices.
        is_convolution: Whether it is the forward of a convolution over two or three dimensions.
        cast_bytes: Bytes that a cast between floating-point formats writes; 0 for other operations.
        cast_of: The pointer of the parameter that such a cast reads; 0 if it reads none.

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
    sizes: Sizes | None = None
    is_convolution: bool = False
    channels_last: bool = False
    cast_bytes: int = 0
    cast_of: int = 0


@final
class Loss(NamedTuple):
    """A softmax over classes: the first operation of the loss of a classifier or a language model."""

    rows: int
    classes: int


@final
@dataclass(frozen=True)
class Wait:
    """A line of the user's code where the host waits for the device; `count` is per step."""

    where: str
    operation: str
    count: int


@final
@dataclass(frozen=True)
class Recording:
    """One recorded step: its operations in order, its losses and its waits."""

    operations: tuple[Operation, ...]
    losses: tuple[Loss, ...] = ()
    waits: tuple[Wait, ...] = ()

    @cached_property
    def of_the_module(self) -> tuple[Operation, ...]:
        """Return the operations outside of optimizers, since some optimizers multiply matrices in any precision."""
        return tuple(operation for operation in self.operations if operation.part != OPTIMIZER)

    @cached_property
    def flops(self) -> dict[str, int]:
        """Return the FLOPs of matrix products by dtype, the largest first."""
        found = Counter[str]()
        for operation in self.of_the_module:
            if operation.flops:
                found[operation.dtype] += operation.flops
        return dict(found.most_common())

    @cached_property
    def module_flops(self) -> dict[str, dict[str, int]]:
        """Return the FLOPs of the forward by module and dtype, the largest first."""
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
        """Return the seconds in all operations, including optimizers."""
        return sum(operation.seconds for operation in self.operations)

    @cached_property
    def call_s(self) -> float:
        """Return the seconds of an operation that computes nothing: the fixed cost of each call."""
        empty = [operation.seconds for operation in self.of_the_module if operation.name in _EMPTY]
        return median(empty) if empty else 0.0

    @cached_property
    def product_s(self) -> float:
        """Return the seconds in matrix products, without the fixed cost of each call."""
        return sum(max(0.0, operation.seconds - self.call_s) for operation in self.of_the_module if operation.flops)

    @cached_property
    def convolution_flops(self) -> int:
        """Return the FLOPs of all convolutions over two or three dimensions, in any memory format."""
        return sum(operation.flops for operation in self.of_the_module if operation.is_convolution)

    @cached_property
    def channels_last(self) -> bool:
        """Return whether convolutions with at least half of these FLOPs have outputs with the channels last."""
        last = [operation.flops for operation in self.of_the_module if operation.channels_last]
        return bool(self.convolution_flops) and sum(last) >= 0.5 * self.convolution_flops


# -- measurements of several steps -------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Variant:
    """An unchanged step or a step with one change: its median seconds per round without data loading, or its error."""

    label: Label
    step_s: tuple[float, ...] = ()
    error: str = ""


@final
@dataclass(frozen=True)
class Memory:
    """Bytes that a training step holds at its peak.

    The peak is measured. Copies and logits follow from the sizes of tensors, and activations are the rest.

    Attributes:
        weights: Parameters and buffers.
        states: Optimizer states.
        casts: Copies of weights in another format.
        logits: Inputs of the largest loss over classes, in half precision and in fp32, and their gradients.
        activations: The rest of the peak: tensors kept for the backward, and temporary ones.
        peak: All together, as :class:`~lightning_amp.measure.PeakMemory` measures it.

    """

    weights: int
    gradients: int
    states: int
    casts: int
    logits: int
    activations: int
    peak: int

    @classmethod
    def of(cls, peak: int, recorded: Recording, weights: int, gradients: int, states: int) -> Memory:
        """Divide a peak into its parts; the logits are at most what is left."""
        copies = {cast.cast_of: cast.cast_bytes for cast in recorded.of_the_module if cast.cast_of}
        per_element = 12 if copies else 8  # with autocast there is a copy in half precision, and its gradient
        largest = max((loss.rows * loss.classes for loss in recorded.losses if loss.classes > 1), default=0)
        casts, left = sum(copies.values()), peak - weights - gradients - states
        logits = max(0, min(per_element * largest, left - casts))
        held = weights + gradients + states + casts + logits
        return cls(weights, gradients, states, casts, logits, max(0, peak - held), max(peak, held))


@final
@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer: its class, whether torch has a fused kernel that it does not use, and the elements it trains."""

    name: str
    can_fuse: bool
    num_parameters: int


@final
@dataclass(frozen=True)
class Loading:
    """A plain `DataLoader`.

    Attributes:
        is_stream: Whether it reads an `IterableDataset`, of which each worker may serve every row.

    """

    workers: int
    persistent: bool = False
    is_stream: bool = False


@final
@dataclass(frozen=True)
class Unaligned:
    """Matrix products whose sizes are not aligned.

    Attributes:
        share: Share of the FLOPs of all products, forward and backward.
        sizes: Rows, depth and columns of those with the most FLOPs.
        padded: These sizes, rounded up.
        format: The format in which they are multiplied.
        module: The first module whose forward computes them.
        padded_speed: How much faster one of them is with padded sizes; `None` if it was not measured.

    """

    share: float
    sizes: Sizes
    padded: Sizes
    format: str
    module: str
    padded_speed: SpeedComparison | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of a module, and its cost.

    Attributes:
        precision: The precision, as :class:`AmpPrecision` names it.
        plugin: The line of code that makes the plugin.
        batch_size: Rows of a batch; 0 if unknown.
        parts: Mean seconds of a step by part: `"data"`, `"forward"`, `"backward"`, `"optimizer"`, `"rest"`; empty if no
            step was timed, because the loss scale did not settle.
        num_timed: Number of steps behind `parts`.
        recorded: One step, operation by operation.
        fp32_recorded: The same step in fp32; `None` if it could not run.
        fp32_memory: Memory at the peak in fp32; `None` if it could not run.
        loading: How batches are loaded; `None` if the loader is not a plain `DataLoader`.
        unaligned: The products whose sizes are not aligned, if there are any.
        num_seen: Number of steps after the loss scale had time to settle.
        num_bad: How many of them were not finite.
        bad_loss: Whether the loss of the recorded step was not finite.

    """

    precision: str
    plugin: str = ""
    batch_size: int
    num_parameters: int
    parts: Mapping[str, float]
    num_timed: int
    recorded: Recording
    fp32_recorded: Recording | None = None
    memory: Memory
    fp32_memory: Memory | None = None
    optimizers: tuple[OptimizerFacts, ...]
    loading: Loading | None
    unaligned: Unaligned | None = None
    variants: tuple[Variant, ...] = ()
    num_seen: int = 1
    num_bad: int = 0
    bad_loss: bool = False

    @property
    def alignment(self) -> int:
        """Return the number that sizes should be multiples of."""
        return 16 if self.precision == "fp8" else 8

    def variant(self, label: Label) -> Variant | None:
        """Return a variant that was timed; `None` if it was not timed, or failed."""
        return next((v for v in self.variants if v.label == label and v.step_s), None)

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a step, data loading included."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes."""
        return self.parts.get(part, 0.0) / max(self.seconds, 1e-12)

    def speed(self, label: Label, base: Label = AS_IT_IS) -> SpeedComparison | None:
        """Return the measured speed of a variant relative to another; `None` if one of them was not timed."""
        changed, before = self.variant(label), self.variant(base)
        return None if changed is None or before is None else compare(changed.step_s, before.step_s)

    def gain(self, label: Label) -> SpeedComparison | None:
        """Return the speed of a change relative to the unchanged step, limited by :meth:`most_gain`.

        `None` if it was not timed, or if its whole interval lies above that limit, which only noise can cause.
        """
        found, most = self.speed(label), self.most_gain(label)
        if found is None or found.ratio <= most:
            return found
        if found.low is None or found.high is None or found.low > most:
            return None
        return replace(found, ratio=most, high=min(found.high, most))

    def most_gain(self, label: Label) -> float:
        """Return the highest possible gain of a change (Amdahl): all other parts of the step keep their time."""
        whole = sum(seconds for part, seconds in self.parts.items() if part != DATA)  # races time no loading
        if label not in _CHANGED or not whole:
            return math.inf
        share = sum(self.parts.get(part, 0.0) for part in _CHANGED[label]) / whole
        return 1 / (1 - share) if share < 1 else math.inf
