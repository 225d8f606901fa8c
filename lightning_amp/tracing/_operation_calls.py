"""One operation of torch, and its backward: what went in, what came out, and from where what is not finite came."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.numerics import all_finite, dense, largest_finite
from lightning_amp.tracing._operation_facts import Facts, facts_of, smallest_magnitude
from lightning_amp.tracing._places import Place
from lightning_amp.tracing._trace import shape_of


@final
class Key(NamedTuple):
    """The same for an operation of another run of the same step, in another precision."""

    name: str
    place: Place | None
    occurrence: int


@final
class OperationCall:
    """One operation.

    Args:
        key: Finds it in another run.
        number: How many operations ran before it.
        module: Qualified name of the module whose own code ran it; `None` outside of all.
        known_as: The name by which its arguments are understood: `1 / x` is a division, and has those of `reciprocal`.

    Attributes:
        makers: Operations whose results went in, finite or not; where something must not be 0, the one that made it.
        sources: Operations whose non-finite results went in.
        takes_nonfinite: Whether something that is not finite went in, from wherever.
        num_nonfinite: How many values of the result are not finite.
        makes_nan: Whether the result has a NaN or a positive infinity; masks have negative ones on purpose.
        dtype: Of the result.
        shape: Of the result.
        largest_input: Largest finite magnitude of what went in; `None` without floating-point tensors.
        largest_output: The same of the result.
        facts: What stands out in the arguments.
        smallest: Smallest magnitude of what must not be 0 in it, on the device.

    """

    def __init__(self, key: Key, number: int, module: str | None, known_as: str = "") -> None:
        self.key, self.number, self.module = key, number, module
        self.known_as = known_as or key.name
        self.makers: list[OperationCall] = []
        self.sources: list[OperationCall] = []
        self.takes_nonfinite = False
        self.num_nonfinite = 0
        self.makes_nan = False
        self.dtype: torch.dtype | None = None
        self.shape: tuple[int, ...] = ()
        self.largest_input: float | None = None
        self.largest_output: float | None = None
        self.facts = Facts()
        self.smallest: Tensor | None = None
        self._measured_before = False

    @property
    def name(self) -> str:
        """Return its plain name: `"div"`."""
        return self.key.name

    def measure_before(self, inputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Look at what an operation in place overwrites, and at what its derivative depends on."""
        self.smallest = smallest_magnitude(self.known_as, args, kwargs)
        if is_in_place(self.name) and inputs:
            self._measure_inputs(inputs)
            self._measured_before = True

    def measure(self, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Look at what came out, and at what went in. Waits for the device."""
        values = [dense(t.detach()) for t in outputs]
        self.num_nonfinite = sum(int((~torch.isfinite(v)).sum()) for v in values)
        self.makes_nan = any(bool((torch.isnan(v) | torch.isposinf(v.real)).any()) for v in values)
        self.dtype, self.shape = outputs[0].dtype, shape_of(outputs[0])
        self.largest_output = largest_of(outputs)
        if not self._measured_before:
            self._measure_inputs(inputs)
        self.facts = facts_of(self.known_as, args, kwargs)

    def takes_from(self, makers: list[OperationCall]) -> None:
        """Note which operations made what goes in."""
        self.makers = makers

    def note_dtype(self, outputs: list[Tensor]) -> None:
        """Note the dtype of the result, without waiting for it."""
        self.dtype = outputs[0].dtype if outputs else None

    def came_from(self, calls: Iterable[OperationCall | None]) -> None:
        """Note which operations made what is not finite of what went in."""
        self.sources = list({id(c): c for c in calls if c is not None and c is not self}.values())

    def _measure_inputs(self, inputs: list[Tensor]) -> None:
        self.takes_nonfinite = not bool(all_finite(inputs))
        self.largest_input = largest_of(inputs)

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


_PLAIN_NAMES = {
    "true_divide": "div", "divide": "div", "truediv": "div", "rdiv": "div", "rtruediv": "div", "multiply": "mul",
    "subtract": "sub", "rsub": "sub", "negative": "neg", "setitem": "assignment", "getitem": "indexing",
    "rpow": "pow", "rmul": "mul", "radd": "add", "rmatmul": "matmul", "iadd": "add", "isub": "sub", "imul": "mul",
    "itruediv": "div", "idiv": "div", "ipow": "pow", "concat": "cat", "concatenate": "cat", "type": "to",
    "half": "to", "bfloat16": "to",
}  # fmt: skip
REVERSED = {"__rdiv__", "__rtruediv__"}
"""Divisions of a number by a tensor."""
_NOT_LOOKED_AT = {
    "get", "set", "size", "dim", "numel", "backward", "grad", "detach", "requires_grad_", "is_floating_point",
    "is_complex", "stride", "data_ptr", "register_hook", "retain_grad", "item", "tolist", "isfinite", "isnan", "isinf",
    "len", "repr", "format", "bool", "set_grad_enabled", "is_inference", "element_size", "storage", "untyped_storage",
}  # fmt: skip


def plain_operation(func: Any) -> str | None:
    """Return the name of an operation as users know it; `None` of what computes nothing."""
    name = str(getattr(func, "__name__", func))
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.strip("_")
    name = _PLAIN_NAMES.get(name, name)
    if name in _NOT_LOOKED_AT or name.startswith(("empty", "new_empty")):
        return None
    return f"{name}_" if in_place else name


def is_in_place(name: str) -> bool:
    """Return whether an operation writes into its first argument."""
    return name.endswith("_") or name == "assignment"


def largest_of(tensors: list[Tensor]) -> float | None:
    """Return the largest finite magnitude of some tensors; `None` of none. Waits for the device."""
    found = [float(largest_finite(t)) for t in tensors if t.numel()]
    return max(found, default=None)
