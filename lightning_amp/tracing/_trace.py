"""The one trace of a step: each operation, its module and line, and the extreme values of what it took and made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._containers import replace, tensors_in, to_fp32
from lightning_amp._user_line import Place
from lightning_amp.findings import OpKind
from lightning_amp.numerics import HALF_DTYPES, dense, extremes, stack_scalars
from lightning_amp.tracing._operations import (
    PRODUCTS,
    Known,
    SpecialKind,
    count_of,
    known_operation,
    plain,
    special_values,
)
from lightning_amp.tracing._places import running_code

FUNCTION = "a Function"
"""The value of `known_as` for an autograd Function of the user. The meaning of its arguments is unknown."""


@final
class Ends:
    """The smallest and largest value of some tensors, on the device until :meth:`Trace.read`."""

    __slots__ = ("high", "low", "scalars")

    def __init__(self, scalars: Iterable[Tensor]) -> None:
        self.scalars = list(scalars)
        self.low = self.high = 0.0  # after reading: both are NaN if a value is

    def read(self, values: list[float]) -> None:
        """Take the values of the scalars, which are freed."""
        self.scalars = []
        self.low, self.high = min(values, default=0.0), max(values, default=0.0)
        if any(map(math.isnan, values)):
            self.low = self.high = math.nan

    @property
    def bad(self) -> frozenset[str]:
        """Return which values are among them: `"nan"`, `"inf"`, `"-inf"`."""
        if math.isnan(self.low):
            return frozenset({"nan"})
        return frozenset(str(end) for end in (self.low, self.high) if math.isinf(end))

    @property
    def largest(self) -> float | None:
        """Return the larger magnitude of the two; `None` if none of them is finite."""
        return max((abs(end) for end in (self.low, self.high) if math.isfinite(end)), default=None)


@final
class Taken(NamedTuple):
    """One input of an operation."""

    maker: Call | None  # the operation that returned this tensor
    writer: Call | None  # the last operation that wrote to its memory
    ends: Ends

    @property
    def source(self) -> Call | None:
        """Return the operation that made a value that is not finite; `None` if no operation did."""
        return next((one for one in (self.maker, self.writer) if one is not None and one.made.bad), None)


@final
class Key(NamedTuple):
    """Identifies an operation: equal in two runs of the same step, whatever their precisions."""

    name: str
    place: Place | None
    occurrence: int


@final
@dataclass(slots=True, eq=False)
class Call:
    """One operation of a step."""

    key: Key
    number: int  # its position among the operations of the run
    module: str | None  # name of the module whose own code ran it; `None` outside of all modules
    known_as: str  # the operation that has its arguments: `1 / x` is a "div" with the arguments of "reciprocal"
    made: Ends
    taken: list[Taken] = field(default_factory=list)
    in_backward: bool = False
    after_backward: bool = False  # such as the norm of its gradients
    is_collective: bool = False  # takes values of other ranks
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    special: list[tuple[SpecialKind, Ends | None]] = field(default_factory=list)  # see `special_values`
    count: int = 0  # for a sum: values per result

    @property
    def sources(self) -> list[Call]:
        """Return the operations that made its bad inputs."""
        return [call for one in self.taken if one.ends.bad and (call := one.source) is not None and call is not self]

    @property
    def takes_from_outside(self) -> bool:
        """Return whether a bad input was there before the step."""
        return any(one.ends.bad and one.source is None for one in self.taken)

    @property
    def takes_bad(self) -> frozenset[str]:
        """Return which bad values are among its inputs."""
        return frozenset[str]().union(*(one.ends.bad for one in self.taken))

    @property
    def largest_input(self) -> float | None:
        """Return the largest finite magnitude among its inputs."""
        return max((size for one in self.taken if (size := one.ends.largest) is not None), default=None)

    @property
    def kind(self) -> OpKind:
        """Return what is special about its arguments, as in :class:`~lightning_amp.findings.Op`."""
        if "nan" in self.takes_bad and self.takes_from_outside and not self.is_collective:
            return "state"
        for kind, ends in self.special:
            if kind == "pole":
                if ends is not None and (ends.low < 0 or ends.high == 0):
                    return "negative" if ends.low < 0 else "zero"
            elif ends is None:
                return "" if kind == "sum" and self.takes_bad else kind
            elif ends.high > 0:
                return kind
        takes_infinity = self.takes_bad & {"inf", "-inf"}
        return "infinite" if takes_infinity and plain(self.key.name) in PRODUCTS and len(self.taken) > 1 else ""

    @property
    def makes_fault(self) -> bool:
        """Return whether it makes NaN or infinity out of other values, and did not write a minus infinity itself."""
        new = set(self.made.bad - self.takes_bad)
        return bool(new) and not (new == {"-inf"} and (self.takes_bad or self.kind == "literal"))


@final
@dataclass(slots=True, eq=False)
class Gradient:
    """The backward of one node of an operation, or a gradient of a parameter."""

    call: Call
    arrived: Ends
    computed: Ends
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    is_inner: bool  # computed by `torch.autograd.grad` for a term of the loss: the scale does not multiply it
    arrived_in: torch.dtype | None  # the dtype of the gradient that arrived

    @property
    def bad(self) -> bool:
        """Return whether a value is NaN or infinity."""
        return bool(self.arrived.bad or self.computed.bad)


@final
class Trace(TorchFunctionMode):
    """Context that records the operations of a step and of its backward.

    It sees the calls in the code, but nothing inside an operation such as `cross_entropy` or the forward of an autograd
    Function. Everything stays on the device until :meth:`read`.

    Args:
        module: The outermost module, for the names of modules.
        boundary: File of the code that runs the step; callers of that file are not reported as places.
        values: Record extreme values. `False`: only gradients.
        loss_in_fp32: Compute the operations outside of all submodules in float32, without casts to half precision.

    Cost: one pass over each input, output and gradient. For looking into a failure, not for every step.

    """

    def __init__(self, module: nn.Module, boundary: str, *, values: bool = True, loss_in_fp32: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []  # in the order in which they ran
        self.gradients: list[Gradient] = []  # in the order in which they were computed
        self.losses: list[Taken] = []
        self.by_key: dict[Key, Call] = {}
        self._names = {id(one): _modules.plain_name(name) for name, one in module.named_modules()}
        self._boundary, self._values, self._loss_in_fp32 = boundary, values, loss_in_fp32
        self._in_backward = self._in_derivative = self._had_backward = False
        self._occurrences: Counter[tuple[str, Place | None]] = Counter()
        self._unread: list[Ends] = []
        self._made = WeakTensorKeyDictionary()  # the operation that made a tensor
        self._written: dict[int, Call] = {}  # the last operation that wrote to a memory address
        self._nodes: dict[Any, Call] = {}
        self._handles: list[Any] = []

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for held in (self._handles, self._nodes, self._made, self._written):
            held.clear()

    def read(self) -> Trace:
        """Read all recorded values back. This waits for each device once."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for scalar in (scalar for ends in self._unread for scalar in ends.scalars):
            by_device.setdefault(scalar.device, []).append(scalar)
        values = {device: iter(stack_scalars(scalars).tolist()) for device, scalars in by_device.items()}
        for ends in self._unread:
            ends.read([next(values[scalar.device]) for scalar in ends.scalars])
        self._unread.clear()
        return self

    # -- forward -------------------------------------------------------------------------------------------------------

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            self._in_derivative = True
            try:
                return func(*args, **kwargs)
            finally:
                self._in_derivative = False
        known = known_operation(func)
        running = None if known is None else running_code(self._names, self._boundary)
        if known is None or running is None:
            return func(*args, **kwargs)
        place, module = running
        is_transformed = _modules.inside_transforms()
        with _modules.outside_function_modes(), _modules.outside_transforms():
            seen = replace((args, kwargs), _behind) if is_transformed else (args, kwargs)
            call = self._before(place, module, known, *seen)
        in_fp32 = self._loss_in_fp32 and not module and not known.is_in_place
        result = _in_fp32(func, args, kwargs) if in_fp32 else func(*args, **kwargs)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            self._after(call, args[0] if result is None or known.name == "assignment" else result)
        return result

    def note_loss(self, loss: Tensor) -> None:
        """Record a loss, before its backward."""
        self.losses += self._take([loss], None)

    @property
    def bad_loss(self) -> Taken | None:
        """Return the first loss that is not finite."""
        return next((loss for loss in self.losses if loss.ends.bad), None)

    @contextmanager
    def in_backward(self) -> Generator[None]:
        """Count operations inside as part of a backward: repeated forwards, and the user's own Functions."""
        self._in_backward = self._had_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _before(self, place: Place | None, module: str | None, known: Known, args: Any, kwargs: Any) -> Call:
        key = Key(known.name, place, self._occurrences[known.name, place])
        self._occurrences[known.name, place] += 1
        taken = self._take(floating(args, kwargs), place)
        when = self._in_backward, self._had_backward
        call = Call(key, len(self.calls), module, known.known_as, Ends([]), taken, *when, known.is_collective)
        if self._values:
            call.count = count_of(known.known_as, args, kwargs)
            with torch.no_grad(), suppress(Exception):  # of a tensor that knows no such operation
                found = special_values(known.known_as, args, kwargs)
                call.special = [(kind, None if one is None else self._keep(one)) for kind, one in found]
        self.calls.append(call)
        self.by_key[key] = call
        return call

    def _take(self, inputs: list[Tensor], place: Place | None) -> list[Taken]:
        self._claim_inputs(inputs, place)
        return [Taken(self._made.get(t), self._written.get(_address(t)), self._ends([t])) for t in inputs]

    def _after(self, call: Call, changed: Any) -> None:
        outputs = floating(changed)
        if not outputs:
            return
        if call.is_collective:
            outputs = [*map(_arrived, outputs)]
        call.dtype, call.shape, call.made = outputs[0].dtype, shape_of(outputs[0]), self._ends(outputs)
        for tensor in outputs:
            self._made[tensor] = call
            self._written[_address(tensor)] = call
            self._claim(tensor.grad_fn, call)

    def _ends(self, tensors: Iterable[Tensor]) -> Ends:
        return self._keep(end for t in tensors for end in _extremes(t)) if self._values else Ends([])

    def _keep(self, scalars: Iterable[Tensor]) -> Ends:
        self._unread.append(Ends(scalars))
        return self._unread[-1]

    # -- backward ------------------------------------------------------------------------------------------------------

    def _claim_inputs(self, inputs: list[Tensor], place: Place | None) -> None:
        """Name the autograd nodes of inputs that no recorded operation made, such as the user's own Functions."""
        for tensor in inputs:
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                own = isinstance(node, BackwardCFunction)
                name = node.name().removesuffix("Backward").removesuffix("Backward0")
                call = Call(Key(name, place, -1), len(self.calls), None, FUNCTION if own else name, Ends([]))
                call.is_collective = _is_function_of_torch(node)
                self._claim(node, call)

    def _claim(self, node: Any, call: Call) -> None:
        """Record the backward of an operation: all its nodes, as far as the nodes of other operations."""
        queue = [node]
        while queue:
            node = queue.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._nodes[node] = call
            self._handles.append(node.register_hook(partial(self._note_backward, call)))
            queue += [inner for inner, _ in node.next_functions]

    def _note_backward(self, call: Call, computed: Any, arrived: Any) -> None:
        with _modules.outside_function_modes(), _modules.outside_transforms():
            given, made = floating(arrived), floating(computed)
            ends = [self._keep(end for t in tensors for end in _extremes(t)) for tensors in (given, made)]
            first = next(iter((*made, *given)), None)
            dtype, shape = (None, ()) if first is None else (first.dtype, shape_of(first))
            arrived_in = given[0].dtype if given else None
            self.gradients.append(Gradient(call, ends[0], ends[1], dtype, shape, self._in_derivative, arrived_in))

    def in_half(self) -> Iterator[Gradient]:
        """Return the gradients in half precision, which the loss scale must not overflow."""
        return (one for one in self.gradients if one.dtype in HALF_DTYPES and not one.is_inner)

    def largest_in_half(self) -> float | None:
        """Return the largest magnitude of the gradients in half precision."""
        return max((size for one in self.in_half() if (size := one.computed.largest) is not None), default=None)


def floating(*values: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors in `values`; inside `torch.func`, the tensors behind them."""
    found = [tensor for _, tensor in tensors_in(values) if tensor.is_floating_point() or tensor.is_complex()]
    return [_modules.behind_transforms(tensor) for tensor in found]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; a nested tensor has no single shape, so the shape of its values is returned."""
    return tuple(dense(tensor).shape if tensor.is_nested else tensor.shape)


def _extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    try:
        return extremes(tensor)
    except Exception:  # some tensor subclasses, such as quantized weights, cannot be asked
        return ()


def _address(tensor: Tensor) -> int:
    try:
        return _sharding.local(tensor).untyped_storage().data_ptr()
    except Exception:  # a sparse tensor has no storage
        return -1


def _in_fp32(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on float32, as with `.float()` on the arguments and without autocast."""
    args, kwargs = to_fp32(args, HALF_DTYPES), to_fp32(kwargs, HALF_DTYPES)
    device_type = next((t.device.type for t in floating(args, kwargs)), "cpu")
    with torch.autocast(device_type, enabled=False):
        result = func(*args, **kwargs)
        is_cast = known_operation(func).name == "to" and isinstance(result, Tensor)  # pyright: ignore[reportOptionalMemberAccess]
        return args[0].float() if is_cast and result.dtype in HALF_DTYPES else result


def _behind(value: Any) -> Any:
    return _modules.behind_transforms(value) if isinstance(value, Tensor) else value


def _is_function_of_torch(node: Any) -> bool:
    """Return whether an autograd node is a Function that torch wrote for collective operations.

    Remove when torch tags collective operations.
    """
    forward = getattr(type(node), "_forward_cls", None)
    return str(getattr(forward, "__module__", "")).startswith("torch.distributed.")


@torch.no_grad()
def _arrived(result: Tensor) -> Tensor:
    """Wait until a result has arrived, if a functional collective operation made it. It stays the same tensor.

    Remove when torch exports `wait_tensor`.
    """
    return torch.ops._c10d_functional.wait_tensor(result)
