"""What the file of a model says: how it is built, in which sizes, and what the articles claim of it."""

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
    """What one training step runs.

    Attributes:
        net: The module.
        loss: Of the module and the batch.
        batch: Synthetic, the same in each step.
        blocks: What is compiled, one by one.
        source: The library that has the model, and its version.

    """

    net: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Batch
    blocks: Sequence[nn.Module]
    source: str


@final
class Claim(NamedTuple):
    """What the articles say against their fp32.

    Attributes:
        speed: How many times as fast.
        memory: In their words.

    """

    speed: float
    memory: str


@final
@dataclass(frozen=True)
class Model:
    """A model of the table.

    Attributes:
        name: On the command line and in the file of records.
        title: On the page.
        make: Makes it, on torch's default device; tiny, if the second argument is true.
        sizes: The usual batch, then others; each is run doubled, too.
        tiny: The batch of `--tiny`.
        unit: What the batch counts, and what the length does.
        why_sizes: Where these batches are usual.
        optimizer: `"AdamW"` or `"SGD"`, which has momentum; both fused.
        num_parameters: How many there are.
        claim: Of the articles; `None` if they have none.
        no_fp8: Why fp8 cannot be used; empty if it can.
        compiled: Arms that are run compiled, too.
        eager_s: Estimated time of a run on an H200, its start included.
        compiled_s: Likewise, of a compiled one.

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
        """Return what weights, gradients and optimizer states take: 16 bytes per parameter, or 12 with momentum."""
        return self.num_parameters * (16 if self.optimizer == "AdamW" else 12)

    def size_text(self, size: Size) -> str:
        """Write a size: `16 sequences of 512 tokens`."""
        return f"{size.batch} {self.unit[0]} of {size.length} {self.unit[1]}"


def library(name: str) -> Any:
    """Import a library, which takes seconds: only where a model is made."""
    return import_module(name)


def loss_of_transformers(net: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes itself."""
    out: Any = net(**batch)
    return out.loss


def classification_loss(net: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of images and labels."""
    return nn.functional.cross_entropy(net(batch["pixel_values"]), batch["labels"])
