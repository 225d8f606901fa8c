"""One operation of torch and its backward: its inputs, its results, and special values among its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._user_line import Place
from lightning_amp.numerics import dense, is_finite, largest_finite
from lightning_amp.tracing._operations import (
    ATTENTION,
    LITERALS,
    ONE_SIDED,
    PRODUCTS_AND_SUMS,
    REDUCTIONS,
    ROOTS,
    SOFTMAXES,
    SUMS,
    argument_of,
    distance_from_end,
    has_roots,
    plain,
)
from lightning_amp.tracing._trace import shape_of

FactKind = Literal["", "empty", "ignored", "masked", "zero", "negative", "one", "cast", "literal", "infinite", "sum"]


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """A special value or shape among the arguments of an operation, which explains a non-finite result.

    Attributes:
        kind: `"empty"`: a reduction over no values. `"ignored"`: a loss that ignores every label of the batch.
            `"masked"`: a row that is minus infinity throughout. `"zero"`: a divisor, or the argument of a root or
            logarithm, is 0. `"negative"`: the argument of a root or logarithm is below 0. `"one"`: a standard deviation
            of one value. `"cast"`: a cast to a dtype that cannot hold the value. `"literal"`: the code writes an
            infinity there. `"infinite"`: a product, sum or difference with an infinite argument. `"sum"`: a sum of
            finite values. Empty: nothing special.
        index: Index of the first such row or element.
        count: Number of such rows or elements; for a sum the number of values per result.

    """

    kind: FactKind = ""
    index: tuple[int, ...] = ()
    count: int = 0


NOTHING = Facts()


@final
class Key(NamedTuple):
    """Identifies an operation: equal in two runs of the same step, whatever their precisions."""

    name: str
    place: Place | None
    occurrence: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """The result of one operation, compared with its result in a reference run."""

    written: str  # torch's own name of the operation: `"__truediv__"`
    # The result is a single number (a loss, a count), or a decision (an index) which the smallest error may change.
    is_blameless: bool
    # an input with several values was not made by an operation: it is from the batch, not a parameter
    takes_exact: bool
    is_bad: bool  # a value of the result is NaN or plus infinity
    takes_bad: bool  # a value of an input is
    output: Tensor | None = None  # a copy of the result, in the reference run
    sums: Tensor | None = None  # the comparison with the reference, see `numerics.output_sums`
    reference: OperationCall | None = None


FUNCTION = "a Function"
"""The value of `known_as` for an autograd Function of the user. The meaning of its arguments is unknown."""


@final
@dataclass(slots=True, eq=False)
class OperationCall:
    """One operation of a step."""

    key: Key
    number: int  # its position among the operations of the run
    module: str | None  # name of the module whose own code ran it; `None` outside of all modules
    known_as: str  # the operation that has its arguments: `1 / x` is a "div" with the arguments of "reciprocal"

    # Operations whose results it takes; if an argument must not be 0, only the operation that made this argument.
    makers: list[OperationCall] = field(default_factory=list)
    smallest: Tensor | None = None  # smallest magnitude of the argument that must not be 0, on the device
    is_collective: bool = False  # takes values of other ranks
    beside: Beside | None = None
    dtype: torch.dtype | None = None
    sources: list[OperationCall] = field(default_factory=list)  # operations whose non-finite results it takes
    # an input is not finite, whether an operation made it or not; assumed if other ranks have a part of the input
    takes_nonfinite: bool = False
    num_nonfinite: int = 0  # number of non-finite values in the result
    makes_nan: bool = False  # the result has NaN or plus infinity; masks have minus infinity on purpose
    shape: tuple[int, ...] = ()
    largest_input: float | None = None  # largest finite magnitude of the inputs
    largest_output: float | None = None  # largest finite magnitude of the result
    facts: Facts = NOTHING

    @property
    def name(self) -> str:
        """Return the operation's plain name: `"div"`."""
        return self.key.name

    def gives(self, dtype: torch.dtype) -> None:
        """Record the dtype of the result, without waiting for the result."""
        self.dtype = dtype

    @torch.no_grad()
    def measure(self, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Measure the results and inputs of the operation. This waits for the device."""
        values = [dense(t.detach()) for t in outputs]
        self.num_nonfinite = sum(int((~torch.isfinite(v)).sum()) for v in values)
        self.makes_nan = any(bool((torch.isnan(v) | torch.isposinf(v.real)).any()) for v in values)
        self.shape = shape_of(outputs[0])
        self.largest_output = largest_of(outputs)
        self.takes_nonfinite = self.is_collective or not all(map(is_finite, inputs))
        self.largest_input = None if self.is_collective else largest_of(inputs)  # may be overwritten by the result
        self.facts = facts_of(self.known_as, args, kwargs)

    def came_from(self, calls: Iterable[OperationCall | None]) -> None:
        """Record the operations that made the non-finite inputs."""
        self.sources = list({id(c): c for c in calls if c is not None and c is not self}.values())

    @property
    def roots(self) -> list[OperationCall]:
        """Return the operations where its non-finite values began, in order."""
        return [call for call in self.chain if not call.sources]

    @property
    def chain(self) -> list[OperationCall]:
        """Return all operations through which its non-finite values went, in order; itself last."""
        found: dict[int, OperationCall] = {self.number: self}
        queue: list[OperationCall] = [self]
        while queue:
            for source in queue.pop().sources:
                if source.number not in found:
                    found[source.number] = source
                    queue.append(source)
        return [found[number] for number in sorted(found)]


@final
@dataclass(frozen=True, slots=True)
class BackwardCall:
    """The backward of an operation, where the first non-finite gradient appeared."""

    call: OperationCall
    is_sum: bool  # the arriving gradient was already not finite, because finite gradients added up to it
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    largest: float | None  # largest finite magnitude of the gradients that arrived


def facts_of(name: str, args: Any, kwargs: Any) -> Facts:
    """Return the first kind of special values found among the arguments of an operation. This waits for the device."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    first, named = tensors[0] if tensors else None, plain(name)
    if first is not None and name in REDUCTIONS and first.numel() == 0:
        return Facts("empty")
    if name in ("cross_entropy", "nll_loss") and _all_ignored(args, kwargs):
        return Facts("ignored")
    if name in SOFTMAXES:
        return _masked_row(name, args, kwargs)
    if name in ("std", "var") and first is not None:
        return Facts("one") if _num_reduced(first, args, kwargs) == 1 else Facts()
    if named in LITERALS:
        return Facts("literal")
    if name == "to":
        return Facts("cast")
    if named in PRODUCTS_AND_SUMS and len(tensors) > 1:
        return Facts("infinite") if any(bool(torch.isinf(t.detach()).any()) for t in tensors) else Facts()
    if name in SUMS and first is not None and is_finite(first):
        return Facts("sum", (), _num_reduced(first, args, kwargs))
    return _root(name, args, kwargs)


def smallest_magnitude(name: str, pole: Tensor) -> Tensor | None:
    """Return the smallest distance from 0, or from another pole: [], on its device; `None` without values."""
    if not pole.numel() or not pole.is_floating_point() or pole.is_nested:
        return None
    return distance_from_end(name, pole.detach()).abs().min()


def _root(name: str, args: Any, kwargs: Any) -> Facts:
    if plain(name) not in ROOTS or not has_roots(name, args, kwargs):
        return Facts()
    value = argument_of(name, args, kwargs)
    if isinstance(value, (int, float)):
        return Facts("zero", (), 1) if value == 0 else Facts()
    if not isinstance(value, Tensor):
        return Facts()
    distance = value.detach().abs() if value.is_complex() else distance_from_end(name, value.detach())
    if plain(name) in ONE_SIDED and bool((distance < 0).any()):
        return _facts_where("negative", distance < 0)
    return _facts_where("zero", distance == 0)


def _all_ignored(args: Any, kwargs: Any) -> bool:
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return bool((target == kwargs.get("ignore_index", -100)).all())


def _masked_row(name: str, args: Any, kwargs: Any) -> Facts:
    if name in ATTENTION:
        masks = [value for key, value in kwargs.items() if "mask" in key and isinstance(value, Tensor)]
        masks += [value for value in args[3:] if isinstance(value, Tensor) and value.dtype == torch.bool]
        padding = kwargs.get("key_padding_mask")
        for mask in masks:
            if mask.dtype == torch.bool:
                # True means "attend" in scaled_dot_product_attention, and "do not attend" in multi-head attention
                hidden = ~mask if name == "scaled_dot_product_attention" and mask is not padding else mask
            else:
                hidden = torch.isneginf(mask)
            if (found := _facts_where("masked", hidden.all(-1))).kind:
                return found
        return Facts()
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or not value.dim():
        return Facts()
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
    if name == "cross_entropy":
        dim = 1 if value.dim() > 1 else 0
    dim = dim if isinstance(dim, int) else -1
    return _facts_where("masked", torch.isneginf(value.detach()).all(dim))


def _num_reduced(value: Tensor, args: Any, kwargs: Any) -> int:
    """Return how many values a reduction combines into each result."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else None)
    if dim is None or not value.dim():
        return value.numel()
    return math.prod(value.shape[one] for one in (dim if isinstance(dim, (list, tuple)) else [dim]))


def _facts_where(kind: FactKind, flags: Tensor) -> Facts:
    """Return index and number of the flagged values; a result without special values if none is flagged."""
    count = int(flags.sum())
    return Facts(kind, tuple(flags.nonzero()[0].tolist()), count) if count else Facts()


def largest_of(tensors: list[Tensor]) -> float | None:
    """Return the largest finite magnitude of some tensors; `None` without values. This waits for the device."""
    found = [float(largest_finite(t)) for t in tensors if t.numel()]
    return max(found, default=None)
