"""One forward and backward pass of a module, watched: where the first non-finite value arose.

Everything is measured on the device; the host reads the answers once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp.numerics import HALF_DTYPES, dense, extremes, largest_finite, stack_scalars

Where = Literal["output", "input", "parameter"]
GradientPlace = tuple[Where, int, int, str]


def floating_in(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the floating-point and complex tensors in `values`, with their paths."""
    return ((path, t) for path, t in tensors_in(values) if t.is_floating_point() or t.is_complex())


def floating(*values: Any) -> list[Tensor]:
    """Return the same without paths, and what is behind `torch.func` transforms."""
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
    """Return the shape; of a nested tensor that of its values, for it has none."""
    return tuple(dense(tensor).shape if tensor.is_nested else tensor.shape)


@final
@dataclass(slots=True)
class Call:
    """One forward of one module. What it measures stays on the device.

    Attributes:
        name: Qualified; empty for the module that is traced itself.
        module: Which.
        number: How many forwards began before it.
        outputs: Dtype and shape of each floating-point output.
        input_ends: Smallest and largest value of each input.
        output_ends: The same of the outputs.
        input_sizes: Largest finite magnitude of each input.

    """

    name: str
    module: nn.Module
    number: int = 0
    outputs: list[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=list)
    input_ends: list[Tensor] = field(default_factory=list)
    output_ends: list[Tensor] = field(default_factory=list)
    input_sizes: list[Tensor] = field(default_factory=list)

    def measure_inputs(self, inputs: list[Tensor]) -> None:
        """Look at what went in."""
        for tensor in inputs:
            self.input_ends += extremes(tensor)
            self.input_sizes.append(largest_finite(tensor))

    def measure_outputs(self, outputs: list[Tensor]) -> None:
        """Look at what came out."""
        for tensor in outputs:
            self.output_ends += extremes(tensor)

    @property
    def takes_nonfinite(self) -> bool:
        """Return whether an input was not finite. Waits for the device."""
        return not all(math.isfinite(end) for end in read(self.input_ends))

    @property
    def largest_input(self) -> float | None:
        """Return the largest finite magnitude of the inputs; `None` without any. Waits for the device."""
        return max(read(self.input_sizes), default=None)


@final
@dataclass(slots=True)
class Arrival:
    """A gradient that was computed.

    Attributes:
        where: Whether it is the gradient of an output or an input of `call`, or of a parameter.
        call: The forward that it belongs to; `None` for a parameter.
        parameter: Its qualified name.
        ends: Its smallest and largest value.
        dtype: Of the gradient.
        shape: Of the gradient.
        key: The same for arrivals of one and the same gradient.
        place: The same for arrivals of another trace of the same step, in another precision.
        is_inner: Whether `torch.autograd.grad` computed it, for a part of the loss: no backward of a loss scales it.

    """

    where: Where
    call: Call | None
    parameter: str
    ends: tuple[Tensor, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: tuple[int, int]
    place: GradientPlace
    is_inner: bool

    @property
    def largest(self) -> Tensor:
        """Return its largest magnitude, [], float32; NaN if one is, 0 without values. On the device."""
        return torch.stack([end.float() for end in self.ends]).abs().max() if self.ends else torch.zeros(())

    @property
    def in_half(self) -> bool:
        """Return whether it was computed in half precision: that of an input is if the module's output is."""
        dtypes = [self.dtype]
        if self.where == "input" and self.call is not None:
            dtypes += [dtype for dtype, _ in self.call.outputs]
        return any(dtype in HALF_DTYPES for dtype in dtypes)


@final
class Trace:
    """Context in which forwards and backwards of `module` are watched. All its hooks come off at the end.

    Args:
        module: What is watched, with all its submodules. It must not be compiled. Names are without what
            `torch.compile` and activation checkpointing put in between.
        values: Also measure the inputs and outputs of each forward. Without it only gradients are.

    Attributes:
        calls: Forwards, in the order in which they ended.
        arrivals: Gradients, in the order in which they were computed.
        owners: Of each watched parameter the module that has it, with its name.
        unseen: Names of modules whose forwards cannot be watched, nor those of their submodules, since they are
            compiled by TorchScript. Gradients of their parameters are.

    Cost: one pass over every input, output and gradient. For looking into a failure, not for every step.

    """

    def __init__(self, module: nn.Module, *, values: bool = True) -> None:
        self.module = module
        self.values = values
        self.calls: list[Call] = []
        self.arrivals: list[Arrival] = []
        self._handles: list[Any] = []
        self._watched: set[int] = set()
        self._num_calls = 0
        self._open: list[Call] = []
        self._in_backward = False
        self._derivatives = _Derivatives()
        self.owners: dict[str, tuple[str, nn.Module]] = {}
        self.unseen: list[str] = []

    def __enter__(self) -> Trace:
        for full_name, module in self.module.named_modules():
            name = _modules.plain_name(full_name)
            if isinstance(module, torch.jit.ScriptModule):  # they take no hooks
                if not any(name.startswith(f"{outer}.") for outer in self.unseen):
                    self.unseen.append(name)
            else:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            for parameter_name, parameter in module.named_parameters(recurse=False):
                self._watch_parameter(f"{name}.{parameter_name}" if name else parameter_name, parameter, name, module)
        self._derivatives.__enter__()
        return self

    def _watch_parameter(self, parameter_name: str, parameter: nn.Parameter, name: str, module: nn.Module) -> None:
        # One that two modules share has one gradient.
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            self.owners[parameter_name] = name, module
            place: GradientPlace = ("parameter", 0, 0, parameter_name)
            self._handles.append(parameter.register_hook(partial(self._arrived, place, None)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._derivatives.__exit__(kind, error, traceback)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward:  # activation checkpointing runs forwards again
            return
        call = Call(name, module, self._num_calls)
        self._num_calls += 1
        self._open.append(call)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            inputs = floating(args, kwargs)
            if self.values:
                call.measure_inputs(inputs)
            for i, tensor in enumerate(inputs):
                self._watch("input", call, i, tensor)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward or not self._open:
            return
        # A forward that raised, and whose exception the user caught, never got here.
        while self._open and self._open[-1].module is not module:
            self._open.pop()
        if not self._open:
            return
        call = self._open.pop()
        self.calls.append(call)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            outputs = floating(output)
            call.outputs.extend((t.dtype, shape_of(t)) for t in outputs)
            if self.values:
                call.measure_outputs(outputs)
            for i, tensor in enumerate(outputs):
                self._watch("output", call, i, tensor)

    def _watch(self, where: Where, call: Call, position: int, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(partial(self._arrived, (where, call.number, position, ""), call)))

    def _arrived(self, place: GradientPlace, call: Call | None, gradient: Tensor) -> None:
        with _modules.outside_function_modes(), _modules.outside_transforms():
            gradient = _modules.behind_transforms(gradient)
            key = (gradient.data_ptr() if gradient.layout is torch.strided else id(gradient), gradient.numel())
            self.arrivals.append(
                Arrival(
                    place[0],
                    call,
                    place[3],
                    extremes(gradient),
                    gradient.dtype,
                    shape_of(gradient),
                    key,
                    place,
                    self._derivatives.under_way,
                )
            )

    @contextmanager
    def in_backward(self) -> Generator[None]:
        """Take what runs inside for a backward: forwards that it runs again (checkpointing) are not counted."""
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
        """Return the gradients that fp16 would have to hold: of parameters, and those that another trace found in half.

        The gradient of a loss is fp32, and as large as the scale: it says nothing. Where that trace found none in half
        (it ran in fp32), these are all but those of scalars. The loss scale does not multiply inner ones: they do not
        count.
        """
        return [
            arrival
            for arrival in self.arrivals
            if not arrival.is_inner
            and (arrival.where == "parameter" or (arrival.place in half_places if half_places else arrival.shape))
        ]

    def first_bad_call(self, *, overflowed: bool = False) -> Call | None:
        """Find the first forward with an output that is not finite, or that `overflowed`. Waits for the device."""
        wrong = _is_wrong if overflowed else _is_nonfinite
        return self.calls[index] if (index := _first([call.output_ends for call in self.calls], wrong)) >= 0 else None

    def first_bad_arrival(self) -> Arrival | None:
        """Find the first gradient that is not finite, seen from the module whose backward computed it.

        A tensor that one module puts out and the next takes has one gradient. It is the next module's backward that
        computed it, so that one is named; of a module and its submodules the innermost. Waits for the device.
        """
        index = _first([arrival.ends for arrival in self.arrivals], _is_nonfinite)
        if index < 0:
            return None
        first = self.arrivals[index]
        same = [first]
        for arrival in self.arrivals[index + 1 :]:
            if arrival.key != first.key or arrival.where == "parameter":
                break
            same.append(arrival)
        consumers = [arrival for arrival in same if arrival.where == "input"]
        return consumers[-1] if consumers else same[0]


@final
class _Derivatives(TorchFunctionMode):
    """Knows while `torch.autograd.grad` runs."""

    under_way = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        self.under_way = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.under_way = False


def magnitudes(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the largest magnitude of each gradient that has values, NaN if one is. Waits for the device once."""
    ends = [end for arrival in arrivals for end in arrival.ends]
    return stack_scalars(ends).view(-1, 2).abs().amax(1).tolist() if ends else []


def read(scalars: Sequence[Tensor]) -> list[float]:
    return stack_scalars(scalars).tolist() if scalars else []


def _first(ends: Sequence[Sequence[Tensor]], wrong: Callable[[float], bool]) -> int:
    """Return the index of the first with an end that is wrong, -1 without one. Waits for the device once."""
    owners = [i for i, of_one in enumerate(ends) for _ in of_one]
    values = read([end for of_one in ends for end in of_one])
    return next((i for i, value in zip(owners, values, strict=True) if wrong(value)), -1)


def _is_nonfinite(value: float) -> bool:
    return not math.isfinite(value)


def _is_wrong(value: float) -> bool:
    """Return whether it is NaN or plus infinity; masks have negative infinities on purpose."""
    return not value < math.inf
