"""One operation of torch, and its backward: what went in, what came out, what stands out in its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._user_line import Place
from lightning_amp.numerics import dense, is_finite, largest_finite, output_sums
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

Kind = Literal["", "empty", "ignored", "masked", "zero", "negative", "one", "cast", "literal", "infinite", "sum"]


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What stands out.

    Attributes:
        kind: `"empty"`: it is taken over no values. `"ignored"`: each label of the batch is left out. `"masked"`: all
            of a row is minus infinity. `"zero"`: a divisor, or what is under a root or logarithm, is 0. `"negative"`:
            the latter is below 0. `"one"`: a spread over one value. `"cast"`: the value does not fit into the dtype.
            `"literal"`: an infinity was written there. `"infinite"`: one went into a product, sum or difference.
            `"sum"`: finite values were added up. Empty: nothing.
        index: Where, of the first: the index of a row or element.
        count: At how many places; of a sum, how many values were added up for each result.

    """

    kind: Kind = ""
    index: tuple[int, ...] = ()
    count: int = 0


NOTHING = Facts()


@final
class Key(NamedTuple):
    """The same for an operation of another run of the same step, in another precision."""

    name: str
    place: Place | None
    occurrence: int


@final
@dataclass(slots=True, eq=False)
class Beside:
    """What one operation gave, beside what it gave in a reference run.

    Attributes:
        written: The operation, as torch has it: `"__truediv__"`.
        is_blameless: Whether it is a single number (a loss, a count), or a decision (an index, a comparison): where two
            candidates are close, the smallest error makes another one of it.
        takes_exact: Whether more than numbers went in that come from no operation: the batch, a parameter.
        is_bad: Whether a value is NaN or plus infinity.
        takes_bad: Whether one that went in is.
        output: A copy of the result, in the reference.
        sums: Against the reference, see :func:`output_sums`.
        reference: The same operation there.

    """

    written: str
    is_blameless: bool
    takes_exact: bool
    is_bad: bool
    takes_bad: bool
    output: Tensor | None = None
    sums: Tensor | None = None
    reference: OperationCall | None = None

    def keep(self, output: Tensor) -> None:
        """Keep a copy of the result, in the reference."""
        self.output = output.detach().clone()

    def compare(self, reference: OperationCall | None, output: Tensor) -> None:
        """Compare the result with that of the same operation in fp32."""
        self.reference = reference
        known = None if reference is None or reference.beside is None else reference.beside.output
        if known is not None and known.shape == output.shape:
            self.sums = output_sums(known, output)


FUNCTION = "a Function"
"""What the arguments of an autograd Function of the user's own are understood by: nothing."""


@final
@dataclass(slots=True, eq=False)
class OperationCall:
    """One operation.

    Attributes:
        key: Finds it in another run.
        number: How many operations ran before it.
        module: Qualified name of the module whose own code ran it; `None` outside of all.
        known_as: The name by which its arguments are understood: `1 / x` is a division, and has those of `reciprocal`.
        makers: Operations whose results went in, finite or not; where something must not be 0, the one that made it.
        dtype: Of the result.
        sources: Operations whose non-finite results went in.
        takes_nonfinite: Whether something that is not finite went in, from wherever.
        num_nonfinite: How many values of the result are not finite.
        makes_nan: Whether the result has a NaN or a positive infinity; masks have negative ones on purpose.
        shape: Of the result.
        largest_input: Largest finite magnitude of what went in; `None` without floating-point tensors.
        largest_output: The same of the result.
        facts: What stands out in the arguments.
        smallest: Smallest magnitude of what must not be 0 in it, on the device.
        beside: Its result against that of a reference run, if the watch compares.

    """

    key: Key
    number: int
    module: str | None
    known_as: str = ""
    makers: list[OperationCall] = field(default_factory=list)
    dtype: torch.dtype | None = None
    sources: list[OperationCall] = field(default_factory=list)
    takes_nonfinite: bool = False
    num_nonfinite: int = 0
    makes_nan: bool = False
    shape: tuple[int, ...] = ()
    largest_input: float | None = None
    largest_output: float | None = None
    facts: Facts = NOTHING
    smallest: Tensor | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        self.known_as = self.known_as or self.key.name

    @property
    def name(self) -> str:
        """Return its plain name: `"div"`."""
        return self.key.name

    def takes(self, makers: list[OperationCall], pole: Tensor | None) -> None:
        """Note which operations made what goes in, and how near to its end that is."""
        self.makers = makers
        self.smallest = None if pole is None else smallest_magnitude(self.known_as, pole)

    def gives(self, dtype: torch.dtype) -> None:
        """Note the dtype of the result, without waiting for it."""
        self.dtype = dtype

    def is_compared(self, makers: list[OperationCall], module: str | None, beside: Beside) -> None:
        """Note what belongs to a comparison."""
        self.makers, self.module, self.beside = makers, module, beside

    @torch.no_grad()
    def measure(self, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Look at what came out, and at what went in. Waits for the device."""
        values = [dense(t.detach()) for t in outputs]
        self.num_nonfinite = sum(int((~torch.isfinite(v)).sum()) for v in values)
        self.makes_nan = any(bool((torch.isnan(v) | torch.isposinf(v.real)).any()) for v in values)
        self.shape = shape_of(outputs[0])
        self.largest_output = largest_of(outputs)
        self.takes_nonfinite = not all(map(is_finite, inputs))
        self.largest_input = largest_of(inputs)
        self.facts = facts_of(self.known_as, args, kwargs)

    def came_from(self, calls: Iterable[OperationCall | None]) -> None:
        """Note which operations made what is not finite of what went in."""
        self.sources = list({id(c): c for c in calls if c is not None and c is not self}.values())

    @property
    def roots(self) -> list[OperationCall]:
        """Return the operations from which its non-finite values come, the first of them first."""
        found: dict[int, OperationCall] = {}
        seen: set[int] = {self.number}
        queue: list[OperationCall] = [self]
        while queue:
            call = queue.pop()
            if not call.sources:
                found[call.number] = call
            for source in call.sources:
                if source.number not in seen:
                    seen.add(source.number)
                    queue.append(source)
        return [found[number] for number in sorted(found)]

    @property
    def chain(self) -> list[OperationCall]:
        """Return it and all that its non-finite values went through, in order."""
        found: dict[int, OperationCall] = {self.number: self}
        queue: list[OperationCall] = [self]
        while queue:
            for source in queue.pop().sources:
                if source.number not in found:
                    found[source.number] = source
                    queue.append(source)
        return [found[number] for number in sorted(found)]


@final
@dataclass(slots=True)
class BackwardCall:
    """The backward of an operation, which made a gradient that is not finite.

    Attributes:
        call: Which operation.
        is_sum: It made nothing: what arrived was not finite, although all that was added up was.
        dtype: Of the gradient.
        shape: Of the gradient.
        largest: Largest finite magnitude of what arrived.

    """

    call: OperationCall
    is_sum: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    largest: float | None


def facts_of(name: str, args: Any, kwargs: Any) -> Facts:
    """Look at the arguments of an operation. Waits for the device."""
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
    """Return the smallest magnitude of what must not be 0, [], on its device; `None` without values."""
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
        below = distance < 0  # to a power: that is no whole number
        return Facts("negative", _first(below), int(below.sum()))
    zero = distance == 0
    return Facts("zero", _first(zero), int(zero.sum())) if bool(zero.any()) else Facts()


def _all_ignored(args: Any, kwargs: Any) -> bool:
    target = args[1] if len(args) > 1 else kwargs.get("target")
    ignored = kwargs.get("ignore_index", -100)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return False
    return bool((target == ignored).all())


def _masked_row(name: str, args: Any, kwargs: Any) -> Facts:
    if name in ATTENTION:
        masks = [value for key, value in kwargs.items() if "mask" in key and isinstance(value, Tensor)]
        masks += [value for value in args[3:] if isinstance(value, Tensor) and value.dtype == torch.bool]
        padding = kwargs.get("key_padding_mask")
        for mask in masks:
            if mask.dtype == torch.bool:
                # scaled_dot_product_attention takes part where it is true, multi-head attention where it is false
                hidden = ~mask if name == "scaled_dot_product_attention" and mask is not padding else mask
            else:
                hidden = torch.isneginf(mask)
            rows = hidden.all(-1)
            if bool(rows.any()):
                return Facts("masked", _first(rows), int(rows.sum()))
        return Facts()
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or not value.dim():
        return Facts()
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
    if name == "cross_entropy":
        dim = 1 if value.dim() > 1 else 0
    dim = dim if isinstance(dim, int) else -1
    rows = torch.isneginf(value.detach()).all(dim)
    return Facts("masked", _first(rows), int(rows.sum())) if bool(rows.any()) else Facts()


def _num_reduced(value: Tensor, args: Any, kwargs: Any) -> int:
    """Return how many values a reduction takes for each of its results."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else None)
    if dim is None or not value.dim():
        return value.numel()
    count = 1
    for one in dim if isinstance(dim, (list, tuple)) else [dim]:
        count *= value.shape[one]
    return count


def _first(flags: Tensor) -> tuple[int, ...]:
    if not flags.dim():
        return ()
    return tuple(int(i) for i in flags.nonzero()[0].tolist())


def largest_of(tensors: list[Tensor]) -> float | None:
    """Return the largest finite magnitude of some tensors; `None` of none. Waits for the device."""
    found = [float(largest_finite(t)) for t in tensors if t.numel()]
    return max(found, default=None)
