"""Record each operation of a training step: its time, FLOPs and casts, its module, and the user's line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp.advice._step import BACKWARD, FORWARD, Loss, Operation, Recording, Wait
from lightning_amp.measure import DeviceClock, flop_formulas, multiplied_dtype
from lightning_amp.tracing import running_place, user_place

_aten = torch.ops.aten

_COPIES = {_aten._to_copy, _aten.copy_}
"""Operations that cast, also inside autocast. Remove when `_to_copy` has a public name."""

_SOFTMAX = _aten._log_softmax
"""The operation of a loss over classes. Remove when it has a public name."""

_CONVOLUTIONS = {_aten.convolution, _aten._convolution}
"""Forwards of convolutions. Remove when `_convolution` does."""

_PRODUCTS = {_aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2)}
"""Products of two matrices, with the places of the matrices among the arguments. Remove with `_CONVOLUTIONS`."""

_WAITS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"),
    *("nonzero", "masked_select", "equal", "unique", "unique_consecutive"),
}
"""Functions that wait for the device: they copy values to the host, or the size of their result depends on values."""
_INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
"""Functions that wait if an index is a mask, since they count its rows."""


@final
class _Call(NamedTuple):
    """A running torch function: its name, whether autocast was on, whether it waits for the device."""

    name: str = ""
    autocast: bool = False
    waits: bool = False


@final
class Recorder:
    """Record what runs inside `with recorder:`. All results stay the same, but the step takes longer.

    Compiled code (`torch.compile`) runs eagerly.

    Args:
        module: The module whose submodules are named.
        device: The device of the step.
        fp32_modules: Modules that the plugin keeps in fp32, and all modules inside them.
        part: Returns the part of the step that is running.
        boundary: The file that runs the step. Frames outside of it are not the user's.

    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        fp32_modules: Iterable[nn.Module],
        part: Callable[[], str],
        boundary: str,
    ) -> None:
        self._operations: list[Operation] = []
        self._times: list[tuple[Any, Any]] = []
        self._losses: list[Loss] = []
        self._waits = Counter[tuple[str, str]]()
        self._where = device
        self._called = _Call()
        self._module, self._part, self._boundary = module, part, boundary
        self._fp32 = {id(m) for m in fp32_modules}
        self._parameters = {p.data_ptr() for p in module.parameters() if p.numel() and p.layout is torch.strided}
        self._stack: list[tuple[str, nn.Module, bool]] = []
        self._clock = DeviceClock(device)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        for full_name, module in self._module.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # TorchScript accepts no hooks
                before = module.register_forward_pre_hook(partial(self._enter, _modules.plain_name(full_name)))
                after = module.register_forward_hook(self._leave, always_call=True)
                self._open.callback(before.remove)
                self._open.callback(after.remove)
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(_Functions(self))
        self._open.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def close(self) -> Recording:
        """Stop watching, and return the record."""
        self._open.close()
        seconds = [self._clock.seconds(*marks) for marks in self._times]
        operations = tuple(replace(o, seconds=s) for o, s in zip(self._operations, seconds, strict=True))
        waits = tuple(Wait(where, what, count) for (where, what), count in self._waits.most_common())
        return Recording(operations, tuple(self._losses), waits)

    # -- the caller ----------------------------------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append((name, module, id(module) in self._fp32))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack:
            if self._stack.pop()[1] is module:
                return

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function, and remember it as the running one until it returns."""
        name, before = resolve_name(function) or getattr(function, "__name__", ""), self._called
        wait = self._wait(name.rpartition(".")[2], args)
        if wait and not before.waits:
            place, is_own = running_place(self._boundary)
            self._waits.update([(str(place), wait)] if is_own else [])
        self._called = _Call(name, torch.is_autocast_enabled(self._where.type), bool(wait) or before.waits)
        try:
            return function(*args, **kwargs)
        finally:
            self._called = before

    def _wait(self, method: str, args: Any) -> str:
        """Return how a function waits for the device; empty if it does not."""
        if not args or not isinstance(args[0], Tensor) or args[0].device.type != self._where.type:
            return ""
        if method in _WAITS:
            return f".{method.strip('_')}()"
        return "a mask as an index" if method in _INDEXING and _has_mask(args[1]) else ""

    # -- the operation -------------------------------------------------------------------------------------------------

    def run(self, function: Any, args: Any, kwargs: Any, formulas: Any) -> Any:
        """Run an operation, and record it."""
        packet = getattr(function, "overloadpacket", function)
        if packet is _SOFTMAX and isinstance(args[0], Tensor) and args[0].dim():
            classes = args[0].shape[args[1]]
            self._losses.append(Loss(args[0].numel() // max(1, classes), classes))
        part = self._part()
        start = self._clock.now()
        out = function(*args, **kwargs)
        end = self._clock.now()
        operation = Operation(
            str(packet).removeprefix("aten."),
            part,
            (self._stack[-1][0] if self._stack else "") or type(self._module).__name__,
            in_fp32_module=any(is_fp32 for _, _, is_fp32 in self._stack),
            asked="" if part == BACKWARD else self._called.name,
            autocast=self._called.autocast,
        )
        if packet in formulas:
            operation = self._product(operation, packet, args, out, formulas[packet](*args, **kwargs, out_val=out))
        elif packet in _COPIES:
            operation = self._cast(operation, args, out)
        self._operations.append(operation)
        self._times.append((start, end))
        return out

    def _product(self, operation: Operation, packet: Any, args: Any, out: Any, flops: int) -> Operation:
        """Return a matrix product or a convolution with its size."""
        dtype = multiplied_dtype(args)
        in_full = dtype in ("float32", "float64") and operation.part == FORWARD
        is_convolution = packet in _CONVOLUTIONS and out.dim() in (4, 5)
        last = is_convolution and (torch.channels_last if out.dim() == 4 else torch.channels_last_3d)
        return replace(
            operation,
            dtype=dtype,
            flops=flops,
            sizes=_sizes(packet, args),
            place=user_place(self._boundary) if in_full else None,
            is_convolution=is_convolution,
            channels_last=bool(last) and out.is_contiguous(memory_format=last),
        )

    def _cast(self, operation: Operation, args: Any, out: Any) -> Operation:
        """Return the record of a cast between floating-point formats with its bytes.

        The record of another copy stays unchanged.
        """
        source = args[1] if operation.name == "copy_" else args[0]
        if not (isinstance(source, Tensor) and isinstance(out, Tensor)):
            return operation
        floating = source.is_floating_point() and out.is_floating_point()
        if not floating or source.dtype == out.dtype or not source.numel():
            return operation
        pointer = 0
        with contextlib.suppress(RuntimeError):  # the tensor has no storage of its own
            pointer = source.data_ptr()
        place, is_own = running_place(self._boundary) if operation.part != BACKWARD else (None, False)
        return replace(
            operation,
            cast_bytes=out.numel() * out.element_size(),
            cast_of=pointer if pointer in self._parameters else 0,
            place=place if is_own else None,  # for a reused weight, our own cast may stand there instead
        )


@final
class _Functions(TorchFunctionMode):
    """Pass each torch function through the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})


@final
class _Operations(_modules.DispatchMode):
    """Pass each operation through the recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._formulas = flop_formulas()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {}, self._formulas)


def _has_mask(index: Any) -> bool:
    """Return whether an index is, or contains, a mask whose rows torch has to count."""
    indices = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _sizes(packet: Any, args: Any) -> tuple[int, int, int] | None:
    """Return rows, depth and columns of a product of two matrices; `None` for another operation."""
    if packet not in _PRODUCTS:
        return None
    left, right = (args[number].shape for number in _PRODUCTS[packet])
    return left[-2], left[-1], right[-1]
