"""Watches every operation of a training step, from below autograd and from where the user called it."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import final, override

from lightning_amp._compat import _aten, _modules
from lightning_amp.advice._record import Allocation, Loss, Operation, Recording, Wait
from lightning_amp.casting import flop_formulas, multiplied_dtype
from lightning_amp.measure import BACKWARD, FORWARD, DeviceClock
from lightning_amp.tracing import called_by_optimizer, running_place, user_place

_READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}
"""Methods that give the values of a tensor to the host; on a CPU some of them are no operation."""


@final
class _Call(NamedTuple):
    """A function of torch that is running: its name, whether autocast was on, whether it gives values to the host."""

    name: str
    autocast: bool
    reads: bool


@final
class Recorder:
    """Records what runs inside of `with recorder:`; everything runs as it would without, but for the time it takes.

    What `torch.compile` compiled runs eagerly.

    Args:
        module: Whose submodules are named.
        fp32_modules: Modules that the plugin keeps in fp32, those inside of them included.
        held: What is there before the step: optimizer states, the batch. Parameters and buffers are, too.
        part: Returns the part of the step that is running.
        boundary: The file of who runs the step: nothing outside of it is the user's.

    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        fp32_modules: Iterable[nn.Module],
        held: Iterable[Tensor],
        part: Callable[[], str],
        boundary: str,
    ) -> None:
        self._operations: list[Operation] = []
        self._allocations: list[Allocation] = []
        self._losses: list[Loss] = []
        self._waits = Counter[tuple[str, str, bool]]()
        self._where = device
        self._called: _Call = _Call("", False, False)
        self._module, self._part, self._boundary = module, part, boundary
        self._fp32 = {id(m) for m in fp32_modules}
        self._parameters = {p.data_ptr() for p in module.parameters() if p.numel() and p.layout is torch.strided}
        self._known = {p for t in (*module.parameters(), *module.buffers(), *held) if (p := _pointer(t))}
        self._stack: list[tuple[str, nn.Module, bool]] = []
        self._live: dict[int, Allocation] = {}
        self._clock = DeviceClock(device)
        self._times: list[tuple[Operation, Any, Any]] = []
        self._handles: list[Any] = []
        self._open = contextlib.ExitStack()
        self._is_open = False

    def __enter__(self) -> Recorder:
        for full_name, module in self._module.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # they take no hooks
                name = _modules.plain_name(full_name)
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                self._allocated(parameter.grad, begin=-1)
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(_Asked(self))
        self._open.enter_context(_Ran(self))
        self._is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> Recording:
        """Stop watching, and return what was recorded."""
        if self._is_open:
            self._is_open = False
            self._open.close()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for operation, start, end in self._times:
                operation.took(self._clock.seconds(start, end))
            self._times.clear()
        waits = tuple(Wait(where, what, count, own) for (where, what, own), count in self._waits.most_common())
        return Recording(tuple(self._operations), tuple(self._allocations), tuple(self._losses), waits)

    # -- where ---------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append((name, module, id(module) in self._fp32))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack:
            if self._stack.pop()[1] is module:
                return

    def call(self, name: str, args: Any) -> _Call:
        """Note that a function of torch is called; returns what was called before, for :meth:`back_to`."""
        before = self._called
        method = name.rpartition(".")[2]
        reads = method in _READS and bool(args) and _is_on(args[0], self._where)
        if reads and not before.reads:
            self._note_wait(f".{method.strip('_')}()")
        autocast = torch.is_autocast_enabled(self._where.type)
        self._called = _Call(name, autocast, reads or before.reads)
        return before

    def back_to(self, before: _Call) -> None:
        """Note that a function of torch has returned."""
        self._called = before

    def _note_wait(self, what: str) -> None:
        """Note that the host waits here."""
        if called_by_optimizer():
            return
        place, is_own = running_place(self._boundary)
        self._waits[str(place) if place else "a library", what, is_own] += 1

    # -- what ----------------------------------------------------------------------------------------------------------

    def begin(self, packet: Any, args: Any) -> Operation:
        """Note an operation that is about to run."""
        name, _, is_fp32 = self._stack[-1] if self._stack else ("", None, False)
        part = self._part()
        operation = Operation(
            str(packet).removeprefix("aten."),
            part,
            name,
            in_fp32_module=is_fp32 or any(fp32 for _, _, fp32 in self._stack),
            asked="" if part == BACKWARD else self._called.name,
            autocast=self._called.autocast,
        )
        wait = "a mask as an index" if packet in _aten.INDEXING and _by_mask(args) else _aten.WAITS.get(packet)
        if wait is not None and not self._called.reads:
            self._note_wait(wait)
        if packet in _aten.SOFTMAX and isinstance(args[0], Tensor) and args[0].dim():
            classes = args[0].shape[args[1]]
            self._losses.append(Loss(args[0].numel() // max(1, classes), classes))
        self._operations.append(operation)
        return operation

    def end(self, operation: Operation, packet: Any, args: Any, kwargs: Any, out: Any, formula: Any) -> None:
        """Note what an operation did."""
        if formula is not None:
            dtype = multiplied_dtype(args)
            in_full = dtype in ("float32", "float64") and operation.part == FORWARD
            flops = formula(*args, **kwargs, out_val=out)
            operation.multiplied(dtype, flops, _sizes(packet, args), user_place(self._boundary) if in_full else None)
            self._note_convolution(operation, packet, out)
        elif packet in _aten.COPIES:
            self._note_cast(operation, packet, args, out)
        for tensor in _tensors(out):
            self._allocated(tensor, begin=len(self._operations) - 1, is_cast=operation.cast_bytes > 0)

    def _note_convolution(self, operation: Operation, packet: Any, out: Any) -> None:
        if packet in _aten.CONVOLUTIONS and out.dim() in (4, 5):
            last = torch.channels_last if out.dim() == 4 else torch.channels_last_3d
            operation.convolved(channels_last=out.is_contiguous(memory_format=last))

    def _note_cast(self, operation: Operation, packet: Any, args: Any, out: Any) -> None:
        source = args[1] if operation.name == "copy_" else args[0]
        if not (isinstance(source, Tensor) and isinstance(out, Tensor)):
            return
        floating = source.is_floating_point() and out.is_floating_point()
        if floating and source.dtype != out.dtype and source.numel():
            pointer = 0
            with contextlib.suppress(RuntimeError):  # no storage of its own
                pointer = source.data_ptr()
            of = pointer if pointer in self._parameters else 0
            place, is_own = running_place(self._boundary) if operation.part != BACKWARD else (None, False)
            if not is_own:  # ours, of a weight that is used again
                place = None
            operation.casted(out.numel() * out.element_size(), of, place)

    def _allocated(self, tensor: Tensor, *, begin: int, is_cast: bool = False) -> None:
        try:
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
            return
        if not size or not pointer or pointer in self._live or pointer in self._known:
            return
        made = Allocation(pointer, size, tensor.numel(), begin, part=self._part(), is_cast=is_cast)
        self._live[pointer] = made
        self._allocations.append(made)
        weakref.finalize(storage, self._freed, made).atexit = False

    def _freed(self, made: Allocation) -> None:
        if self._is_open:
            made.freed(len(self._operations))
            if self._live.get(made.pointer) is made:
                del self._live[made.pointer]

    def timed(self, operation: Operation, run: Callable[[], Any]) -> Any:
        """Run an operation and note its time."""
        start = self._clock.now()
        try:
            return run()
        finally:
            self._times.append((operation, start, self._clock.now()))


@final
class _Asked(TorchFunctionMode):
    """Notes which function of torch was called, and whether autocast was on there."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._recorder.call(resolve_name(func) or getattr(func, "__name__", ""), args)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._recorder.back_to(before)


@final
class _Ran(_modules.DispatchMode):
    """Hands each operation to the recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._formulas = flop_formulas()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        recorder = self._recorder
        operation = recorder.begin(packet, args)
        out = recorder.timed(operation, lambda: func(*args, **kwargs))
        recorder.end(operation, packet, args, kwargs, out, self._formulas.get(packet))
        return out


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device.type == device.type


def _pointer(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _by_mask(args: Any) -> bool:
    """Return whether what is indexed is chosen by a mask, whose rows have to be counted."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _sizes(packet: Any, args: Any) -> tuple[int, int, int] | None:
    where = _aten.PRODUCTS.get(packet)
    if where is None:
        return None
    left, right = args[where[0]], args[where[1]]
    return left.shape[-2], left.shape[-1], right.shape[-1]


def _tensors(out: Any) -> Iterable[Tensor]:
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return [tensor for item in out for tensor in _tensors(item)]
    return ()
