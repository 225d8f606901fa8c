"""The description of a model: how it is built, in which sizes, and what the articles claim of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import final

Batch = dict[str, Tensor]


@final
class Size(NamedTuple):
    """The batch of one step.

    Attributes:
        batch: Images or sequences.
        length: Pixels of a side, or tokens of a sequence.

    """

    batch: int
    length: int

    def doubled(self) -> Size:
        """Return twice as many samples."""
        return Size(2 * self.batch, self.length)


@final
class Workload(NamedTuple):
    """The parts of a training step.

    Attributes:
        net: The module.
        loss: Returns the loss of the module on a batch.
        batch: Synthetic, the same in each step.
        blocks: The modules that are compiled, one by one.
        source: The library that has the model, and its version.

    """

    net: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Batch
    blocks: Sequence[nn.Module]
    source: str


@final
class Claim(NamedTuple):
    """The claims of the articles, against their fp32.

    Attributes:
        speed: How many times as fast.
        memory: The claim about memory, in their words.

    """

    speed: float
    memory: str


@final
@dataclass(frozen=True)
class Model:
    """A model of the table.

    Attributes:
        name: Its name on the command line and in the file of records.
        title: Its name on the page.
        make: Makes it, on torch's default device; tiny, if the second argument is true.
        sizes: The usual batch, then others; each is also run doubled.
        tiny: The batch of `--tiny`.
        unit: The units of the batch and of the length.
        why_sizes: Why these batches are usual.
        optimizer: `"AdamW"` or `"SGD"`, which has momentum; both fused.
        num_parameters: Number of parameters.
        claim: The claims of the articles; `None` if they have none.
        no_fp8: Why fp8 cannot be used; empty if it can.
        compiled: Arms that are also run compiled.
        eager_s: Estimated time of a run on an H200, its start included.
        compiled_s: Estimated time of a compiled run.

    """

    name: str
    title: str
    make: Callable[[Size, bool], Workload]
    sizes: tuple[Size, ...]
    tiny: Size
    unit: tuple[str, str]
    why_sizes: str
    optimizer: str
    num_parameters: int
    claim: Claim | None = None
    no_fp8: str = ""
    compiled: tuple[str, ...] = ()
    eager_s: float = 16.0
    compiled_s: float = 40.0

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer states: 16 per parameter, or 12 with momentum."""
        return self.num_parameters * (16 if self.optimizer == "AdamW" else 12)

    def size_text(self, size: Size) -> str:
        """Write a size: `16 sequences of 512 tokens`."""
        return f"{size.batch} {self.unit[0]} of {size.length} {self.unit[1]}"


def library(name: str) -> Any:
    """Import a library when a model is made, because that takes seconds."""
    return import_module(name)


def loss_of_transformers(net: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes itself."""
    out: Any = net(**batch)
    return out.loss


def classification_loss(net: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of images and labels."""
    return nn.functional.cross_entropy(net(batch["pixel_values"]), batch["labels"])
