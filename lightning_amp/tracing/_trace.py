"""One forward and backward pass of a module, watched: where the first non-finite value arose.

Everything is measured on the device; the host reads the answers once, at the end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
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
from lightning_amp.numerics import HALF_DTYPES, all_finite, dense, largest, largest_finite, nonfinite, stack_scalars

Where = Literal["output", "input", "parameter"]
GradientPlace = tuple[Where, int, int, str]


def floating_in(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the floating-point and complex tensors in `values`, with their paths."""
    return ((path, t) for path, t in tensors_in(values) if t.is_floating_point() or t.is_complex())


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor that of its values, for it has none."""
    return tuple(dense(tensor).shape if tensor.is_nested else tensor.shape)


@final
@dataclass(slots=True)
class Call:
    """One forward of one module.

    Attributes:
        name: Qualified; empty for the module that is traced itself.
        module: Which.
        number: How many forwards began before it.
        outputs: Dtype and shape of each floating-point output.
        bad_input: Whether an input was not finite, bool [].
        bad_output: The same for the outputs.
        overflowed: Whether an output has a NaN or a positive infinity: masks have negative ones on purpose.
        largest_input: Largest finite magnitude of the inputs, [].
        largest_output: The same of the outputs.

    """

    name: str
    module: nn.Module
    number: int = 0
    outputs: list[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=list)
    bad_input: Tensor | None = None
    bad_output: Tensor | None = None
    overflowed: Tensor | None = None
    largest_input: Tensor | None = None
    largest_output: Tensor | None = None

    def measure_inputs(self, inputs: list[Tensor]) -> None:
        """Look at what went in."""
        if inputs:
            self.bad_input, self.largest_input = _extent(inputs)

    def measure_outputs(self, outputs: list[Tensor]) -> None:
        """Look at what came out."""
        if outputs:
            self.bad_output, self.largest_output = _extent(outputs)
            values = [dense(t.detach()) for t in outputs]
            self.overflowed = stack_scalars([(torch.isnan(t) | torch.isposinf(t.real)).any() for t in values]).any()


@final
@dataclass(slots=True)
class Arrival:
    """A gradient that was computed.

    Attributes:
        where: Whether it is the gradient of an output or an input of `call`, or of a parameter.
        call: The forward that it belongs to; `None` for a parameter.
        parameter: Its qualified name.
        bad: Whether it is not finite, bool [].
        largest: Its largest magnitude, []; NaN if one is.
        dtype: Of the gradient.
        shape: Of the gradient.
        key: The same for arrivals of one and the same gradient.
        place: The same for arrivals of another trace of the same step, in another precision.
        is_inner: Whether `torch.autograd.grad` computed it, for a part of the loss: no backward of a loss scales it.

    """

    where: Where
    call: Call | None
    parameter: str
    bad: Tensor
    largest: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: tuple[int, int]
    place: GradientPlace
    is_inner: bool

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

    @torch.no_grad()
    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward:  # activation checkpointing runs forwards again
            return
        call = Call(name, module, self._num_calls)
        self._num_calls += 1
        self._open.append(call)
        with _modules.outside_transforms():
            inputs = [_modules.behind_transforms(t) for _, t in floating_in([args, kwargs])]
            if self.values:
                call.measure_inputs(inputs)
            for i, tensor in enumerate(inputs):
                self._watch("input", call, i, tensor)

    @torch.no_grad()
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
        with _modules.outside_transforms():
            outputs = [_modules.behind_transforms(t) for _, t in floating_in(output)]
            call.outputs.extend((t.dtype, shape_of(t)) for t in outputs)
            if self.values:
                call.measure_outputs(outputs)
            for i, tensor in enumerate(outputs):
                self._watch("output", call, i, tensor)

    def _watch(self, where: Where, call: Call, position: int, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(partial(self._arrived, (where, call.number, position, ""), call)))

    @torch.no_grad()
    def _arrived(self, place: GradientPlace, call: Call | None, gradient: Tensor) -> None:
        with _modules.outside_transforms():
            gradient = _modules.behind_transforms(gradient)
            magnitude = largest(gradient)  # one pass: infinity and NaN show in it
            key = (gradient.data_ptr() if gradient.layout is torch.strided else id(gradient), gradient.numel())
            self.arrivals.append(
                Arrival(
                    place[0],
                    call,
                    place[3],
                    nonfinite(magnitude),
                    magnitude,
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

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run `loss.backward(...)`, as one."""
        with self.in_backward():
            loss.backward(*args, **kwargs)

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
        flags = [call.overflowed if overflowed else call.bad_output for call in self.calls]
        index = _first(flags)
        return None if index is None else self.calls[index]

    def first_bad_arrival(self) -> Arrival | None:
        """Find the first gradient that is not finite, seen from the module whose backward computed it.

        A tensor that one module puts out and the next takes has one gradient. It is the next module's backward that
        computed it, so that one is named; of a module and its submodules the innermost. Waits for the device.
        """
        index = _first([arrival.bad for arrival in self.arrivals])
        if index is None:
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


def _first(flags: list[Tensor | None]) -> int | None:
    known = {i: flag for i, flag in enumerate(flags) if flag is not None}
    if not known:
        return None
    return next((i for i, bad in zip(known, stack_scalars([*known.values()]).tolist(), strict=True) if bad), None)


def _extent(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether a value is not finite, bool [], and the largest finite magnitude, []."""
    return all_finite(tensors).logical_not(), stack_scalars([largest_finite(t) for t in tensors]).max()
