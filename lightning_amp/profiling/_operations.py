"""What was seen of one training step: its operations, and the memory that they made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import final

from lightning_amp.tracing import Place


@final
@dataclass(slots=True)
class Operation:
    """One operation, below autograd and autocast.

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
        channels_last: Whether its output has the channels last.
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
        pointer: Where.
        num_bytes: How much.
        numel: Elements of that tensor.
        begin: How many operations had run before.
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
@dataclass(slots=True)
class Loss:
    """A softmax over classes.

    Attributes:
        rows: How many.
        classes: How many.
        dtype: Of its input.

    """

    rows: int
    classes: int
    dtype: torch.dtype
