"""Watch the modules of one forward and backward pass, to find where the first non-finite value appeared.

All measurements stay on the device; the host reads them once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._containers import tensors_in
from lightning_amp.findings import Where
from lightning_amp.numerics import HALF_DTYPES, dense, extremes, largest_finite, stack_scalars


def floating_in(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the floating-point and complex tensors in `values`, with their paths."""
    return ((path, t) for path, t in tensors_in(values) if t.is_floating_point() or t.is_complex())


def floating(*values: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors in `values`; inside `torch.func`, the tensors behind them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                found.append(_modules.behind_transforms(value))
        elif isinstance(value, (list, tuple)):
            found += floating(*value)
        elif isinstance(value, dict):
            found += floating(*value.values())
        elif not isinstance(value, _SCALARS):
            found += [_modules.behind_transforms(tensor) for _, tensor in floating_in(value)]
    return found


_SCALARS = (float, int, str, type(None), torch.dtype, torch.device)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; a nested tensor has no single shape, so the shape of its values is returned."""
    return tuple(dense(tensor).shape if tensor.is_nested else tensor.shape)


@final
@dataclass(slots=True)
class Call:
    """One forward of one module. Its measurements stay on the device."""

    name: str
    module: nn.Module
    number: int  # number of forwards that began before this one
    outputs: list[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape
    input_ends: list[Tensor] = field(default_factory=list)  # smallest and largest value of each input
    output_ends: list[Tensor] = field(default_factory=list)  # smallest and largest value of each output
    input_sizes: list[Tensor] = field(default_factory=list)  # largest finite magnitude of each input

    @property
    def takes_nonfinite(self) -> bool:
        """Return whether an input was not finite. This waits for the device."""
        return not all(map(math.isfinite, _read(self.input_ends)))

    @property
    def largest_input(self) -> float | None:
        """Return the largest finite magnitude of the inputs; `None` without any. This waits for the device."""
        return max(_read(self.input_sizes), default=None)


@final
class GradientPlace(NamedTuple):
    """Identifies a gradient of a step: equal in two traces of the same step, whatever their precisions."""

    where: Where
    call: int = 0  # number of the forward
    position: int = 0  # index among its outputs or inputs
    parameter: str = ""


@final
@dataclass(slots=True)
class Arrival:
    """A gradient that a backward computed."""

    place: GradientPlace
    call: Call | None  # the forward that has the tensor as output or input; `None` for a parameter
    ends: tuple[Tensor, ...]  # its smallest and largest value
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: tuple[int, int]  # equal for two arrivals of the same gradient
    is_inner: bool  # computed by `torch.autograd.grad` for a term of the loss: the scale does not multiply it

    @property
    def largest(self) -> Tensor:
        """Return its largest magnitude, [], float32; NaN if a value is NaN, 0 without values. On the device."""
        return torch.stack([end.float() for end in self.ends]).abs().max() if self.ends else torch.zeros(())

    @property
    def in_half(self) -> bool:
        """Return whether the gradient, or for an input also an output of the module, is in half precision."""
        outputs = self.call.outputs if self.place.where == "input" and self.call is not None else []
        return any(dtype in HALF_DTYPES for dtype in (self.dtype, *(dtype for dtype, _ in outputs)))


@final
class Trace(TorchFunctionMode):
    """Context that watches the forwards and backwards of `module`. It removes all its hooks at the end.

    Args:
        module: The module to watch, with all its submodules; it must not be compiled.
        values: Also measure the inputs and outputs of each forward. `False` measures gradients only.
        bad_parameters: The parameters that are not finite on any rank, for a sharded module; by default each parameter
            is read where it matters.

    Cost: one pass over every input, output and gradient. For looking into a failure, not for every step.

    """

    def __init__(
        self, module: nn.Module, *, values: bool = True, bad_parameters: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self.module, self.bad_parameters = module, bad_parameters
        self.calls: list[Call] = []  # in the order in which they ended
        self.arrivals: list[Arrival] = []  # in the order in which they were computed
        self.owners: dict[str, tuple[str, nn.Module]] = {}  # the module of each parameter, with its name
        # Outermost modules that TorchScript compiled: only gradients of their parameters are watched.
        self.unseen: list[str] = []
        self._values = values
        self._own_parameters: dict[nn.Module, list[tuple[str, str]]] = {}  # by module: own name, qualified name
        self._watched: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._num_calls = 0
        self._open: list[Call] = []
        self._in_backward = self._in_derivative = False

    @override
    def __enter__(self) -> Trace:
        watched: set[nn.Parameter] = set()
        for full_name, module in self.module.named_modules():
            name = _modules.plain_name(full_name)
            if _sharding.is_wrapper(module):
                continue
            if isinstance(module, torch.jit.ScriptModule):  # TorchScript modules accept no hooks
                if not any(name.startswith(f"{outer}.") for outer in self.unseen):
                    self.unseen.append(name)
            else:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            for own_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter not in watched:  # two modules may share the parameter
                    watched.add(parameter)
                    parameter_name = f"{name}.{own_name}" if name else own_name
                    self.owners[parameter_name] = name, module
                    self._own_parameters.setdefault(module, []).append((own_name, parameter_name))
                    self._watch_parameter(parameter, parameter_name)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self._watched.clear()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        self._in_derivative = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._in_derivative = False

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward or _is_redirected(module):  # activation checkpointing runs forwards again
            return
        for own_name, parameter_name in self._own_parameters.get(module, ()):
            # FSDP replaces its shards, whose hooks are not called, by gathered parameters for the forward
            self._watch_parameter(getattr(module, own_name), parameter_name)
        call = Call(name, module, self._num_calls)
        self._num_calls += 1
        self._open.append(call)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            for position, tensor in enumerate(floating(args, kwargs)):
                if self._values:
                    call.input_ends.extend(extremes(tensor))
                    call.input_sizes.append(largest_finite(tensor))
                self._watch(GradientPlace("input", call.number, position), call, tensor)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward or not self._open:
            return
        # This line is not reached by a forward that raised an exception which the user caught.
        while self._open and self._open[-1].module is not module:
            self._open.pop()
        if not self._open:
            return
        call = self._open.pop()
        self.calls.append(call)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            for position, tensor in enumerate(floating(output)):
                call.outputs.append((tensor.dtype, shape_of(tensor)))
                if self._values:
                    call.output_ends.extend(extremes(tensor))
                self._watch(GradientPlace("output", call.number, position), call, tensor)

    def _watch_parameter(self, parameter: Tensor, name: str) -> None:
        if id(parameter) not in self._watched and parameter.requires_grad:
            self._watched[id(parameter)] = parameter
            place = GradientPlace("parameter", parameter=name)
            self._handles.append(parameter.register_hook(partial(self._arrived, place, None)))

    def _watch(self, place: GradientPlace, call: Call, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(partial(self._arrived, place, call)))

    def _arrived(self, place: GradientPlace, call: Call | None, gradient: Tensor) -> None:
        with _modules.outside_function_modes(), _modules.outside_transforms():
            gradient = _modules.behind_transforms(gradient)
            gradient = _sharding.local(gradient)
            key = (gradient.data_ptr() if gradient.layout is torch.strided else id(gradient), gradient.numel())
            ends, shape = extremes(gradient), shape_of(gradient)
            self.arrivals.append(Arrival(place, call, ends, gradient.dtype, shape, key, self._in_derivative))

    @contextmanager
    def in_backward(self) -> Generator[None]:
        """Leave out the forwards that run inside: activation checkpointing repeats them in a backward."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    @property
    def half_places(self) -> set[GradientPlace]:
        """Return the places where this pass computed gradients in half precision."""
        return {arrival.place for arrival in self.arrivals if arrival.in_half and not arrival.is_inner}

    def gradients_in_half(self, half_places: set[GradientPlace]) -> list[Arrival]:
        """Return the gradients that have to fit into fp16: gradients of parameters, and gradients at `half_places`.

        Without `half_places`, from a run in fp32, all gradients count except gradients of scalars, because the gradient
        of a loss is fp32, and as large as the scale. Inner gradients do not count, because the scale does not multiply
        them.
        """
        return [
            arrival
            for arrival in self.arrivals
            if not arrival.is_inner
            and (arrival.place.where == "parameter" or (arrival.place in half_places if half_places else arrival.shape))
        ]

    def first_bad_call(self, *, overflowed: bool = False) -> Call | None:
        """Find the first forward with a non-finite output. This waits for the device.

        With `overflowed` minus infinity does not count: masks have it on purpose.
        """
        is_good = _is_no_overflow if overflowed else math.isfinite
        index = _first([call.output_ends for call in self.calls], is_good)
        return None if index is None else self.calls[index]

    def first_bad_arrival(self) -> Arrival | None:
        """Find the first gradient that is not finite, and the module whose backward computed it.

        If an output of one module is the input of the next, its gradient is recorded for both modules. The backward of
        the next module computed it, so the record of the next module is returned; if several nested modules have a
        record, the innermost module's is returned. This waits for the device.
        """
        index = _first([arrival.ends for arrival in self.arrivals], math.isfinite)
        if index is None:
            return None
        first = self.arrivals[index]
        same = [first]
        for arrival in self.arrivals[index + 1 :]:
            if arrival.key != first.key or arrival.place.where == "parameter":
                break
            same.append(arrival)
        consumers = [arrival for arrival in same if arrival.place.where == "input"]
        return consumers[-1] if consumers else same[0]


def magnitudes(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the largest magnitude of each gradient that has values, NaN if a value is NaN.

    This waits for the device once.
    """
    ends = [end for arrival in arrivals for end in arrival.ends]
    return stack_scalars(ends).view(-1, 2).abs().amax(1).tolist() if ends else []


def _read(scalars: Sequence[Tensor]) -> list[float]:
    return stack_scalars(scalars).tolist() if scalars else []


def _first(ends: Sequence[Sequence[Tensor]], is_good: Callable[[float], bool]) -> int | None:
    """Return the index of the first item whose smallest or largest value is bad. This waits for the device once."""
    owners = [i for i, own in enumerate(ends) for _ in own]
    values = _read([end for own in ends for end in own])
    return next((i for i, value in zip(owners, values, strict=True) if not is_good(value)), None)


def _is_no_overflow(value: float) -> bool:
    return value < math.inf


def _is_redirected(module: Any) -> bool:
    """Return whether the next call of a module's `forward` runs a step, as Lightning arranges for FSDP1.

    Remove when FSDP1 is removed from torch.
    """
    return getattr(vars(module).get("forward"), "__qualname__", "").startswith("_ForwardRedirection")
