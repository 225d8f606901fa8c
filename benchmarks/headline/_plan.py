"""The runs of the table, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import final

from benchmarks.headline._arms import ARMS
from benchmarks.headline.models import MODELS, Model, Size

_EAGER = ("fp32", "tf32", "lightning_bf16", "bf16", "lightning_fp16", "fp16")
_SHORT = ("tf32", "lightning_bf16", "bf16", "fp16")
"""Factors of the batch sizes beside the usual one."""


@final
class Run(NamedTuple):
    """One run: its model, arm, and batch.

    Attributes:
        model: Its name.
        arm: The name of the precision.
        batch: Images or sequences.
        length: Pixels of a side, or tokens of a sequence.
        compiled: Whether `torch.compile` is used.

    """

    model: str
    arm: str
    batch: int
    length: int
    compiled: bool = False

    @property
    def size(self) -> Size:
        """Return the contents of a batch."""
        return Size(self.batch, self.length)

    @property
    def case(self) -> Run:
        """Return the settings that all arms of a table share."""
        return self._replace(arm="")

    def __str__(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return f"{self.model}, {ARMS[self.arm].title}, {self.batch} x {self.length}, {mode}"

    def estimated_s(self) -> float:
        """Return the approximate seconds on an H200, with the start."""
        model = MODELS[self.model]
        if self.arm == "fp8" and model.no_fp8:
            return 0.0
        return model.compiled_s if self.compiled else model.eager_s


def plan(models: Sequence[Model], *, tiny: bool = False) -> list[Run]:
    """Return the runs in their order: for each model all precisions, then compiled, then with other batches.

    Args:
        models: The models.
        tiny: Each arm once, at toy sizes; compiled only if the arm has no eager run.

    """
    if tiny:
        return [run for model in models for run in _all_arms(model)]
    eager = [run for model in models for run in _runs(model, model.sizes[0], _arms(model))]
    compiled = [run for model in models for run in _runs(model, model.sizes[0], model.compiled, compiled=True)]
    others = [run for model in models for size in _other_sizes(model) for run in _runs(model, size, _SHORT)]
    return [*eager, *compiled, *others]


def _arms(model: Model) -> tuple[str, ...]:
    """Return the eager arms: fp8 is for compiled modules, but the table says here if it cannot be used."""
    return (*_EAGER, "fp8") if model.no_fp8 else _EAGER


def _runs(model: Model, size: Size, arms: Sequence[str], *, compiled: bool = False) -> Iterator[Run]:
    for arm in arms:
        yield Run(model.name, arm, size.batch, size.length, compiled)


def _other_sizes(model: Model) -> Iterator[Size]:
    first, *others = model.sizes
    yield first.doubled()
    for size in others:
        yield size
        yield size.doubled()


def _all_arms(model: Model) -> Iterator[Run]:
    yield from _runs(model, model.tiny, _arms(model))
    yield from _runs(model, model.tiny, model.compiled[-1:], compiled=True)
