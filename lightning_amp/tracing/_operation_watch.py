"""Every operation of a forward and backward: which one made the first value, or gradient, that is not finite."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import replace
from lightning_amp.numerics import all_finite
from lightning_amp.tracing._operation_calls import (
    REVERSED,
    BackwardCall,
    Key,
    OperationCall,
    largest_of,
    plain_operation,
)
from lightning_amp.tracing._operation_facts import pole_of
from lightning_amp.tracing._places import Place, running_code
from lightning_amp.tracing._trace import floating_in, shape_of

Edit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Does the work of an operation in another way: gets it, and its arguments."""


@final
class OperationWatch(TorchFunctionMode):
    """Context in which operations of torch on tensors are watched, and their backwards.

    What is inside of an operation, such as `cross_entropy`, is not looked at; nor are custom autograd Functions in
    their forward.

    Args:
        module: Names the modules whose code runs.
        boundary: File of the code that runs the step: no place above it counts.
        wanted: Operations to measure although their results are finite.
        edits: What to do in the place of some operations, by name and place.

    Attributes:
        bad: Operations with results that are not finite, in order; of the forward.
        bad_in_backward: Those that a backward ran, in a Function of the user's own.
        measured: Those that were wanted and ran, finite or not.
        first_backward: The first backward whose gradient is not finite.
        made_loss: What made the first loss that is not finite.

    Cost: each result is read by the host. For looking into a failure, not for every step.

    """

    def __init__(
        self,
        module: nn.Module,
        boundary: str,
        wanted: Iterable[Key] = (),
        edits: Mapping[tuple[str, Place | None], Edit] | None = None,
    ) -> None:
        super().__init__()
        self.bad: list[OperationCall] = []
        self.bad_in_backward: list[OperationCall] = []
        self._in_backward = False
        self.measured: dict[Key, OperationCall] = {}
        self.first_backward: BackwardCall | None = None
        self.made_loss: OperationCall | None = None
        self._names = {id(m): _modules.plain_name(name) for name, m in module.named_modules()}
        self._parameters = list(module.parameters())
        self._of_gradients: dict[int, weakref.ref[Tensor]] = {}  # what code outside of a backward made of `.grad`
        self._boundary = boundary
        self._wanted, self._edits = set(wanted), dict(edits or {})
        self._occurrences: Counter[tuple[str, Place | None]] = Counter()
        self._number = 0
        self._makers: dict[int, tuple[weakref.ref[Tensor], OperationCall]] = {}  # of what is not finite
        self._made: dict[int, tuple[weakref.ref[Tensor], OperationCall]] = {}
        self._by_storage: dict[int, OperationCall] = {}
        self._nodes: dict[Any, OperationCall] = {}
        self._handles: list[Any] = []

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self._makers.clear()
        self._made.clear()
        self._by_storage.clear()

    def note_loss(self, loss: Tensor) -> None:
        """Take a tensor for a loss, before its backward. The first that is not finite counts."""
        self.made_loss = self.made_loss or self.maker(loss)

    @contextmanager
    def in_backward(self) -> Generator[None]:
        """Take what runs inside for a backward: forwards that are run again, and Functions of the user's own."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def maker(self, tensor: Tensor | None) -> OperationCall | None:
        """Return the operation that made a tensor not finite, while the context is entered."""
        if tensor is None:
            return None
        ref, call = self._makers.get(id(tensor), (None, None))
        if ref is not None and ref() is tensor:
            return call
        try:
            return self._by_storage.get(tensor.untyped_storage().data_ptr())
        except Exception:  # a sparse tensor has none
            return None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = plain_operation(func)
        if name is None:
            return func(*args, **kwargs)
        running = running_code(self._names, self._boundary)
        if running is None:
            return func(*args, **kwargs)
        place, module = running
        key = Key(name, place, self._occurrences[name, place])
        self._occurrences[name, place] += 1
        is_reversed = str(getattr(func, "__name__", "")) in REVERSED
        call = OperationCall(key, self._number, module, "reciprocal" if is_reversed else "")
        self._number += 1
        is_transformed = _modules.inside_transforms()
        with torch.no_grad(), _modules.outside_transforms():
            inputs = [_modules.behind_transforms(t) for _, t in floating_in([args, kwargs])]
            self._claim_inputs(inputs, place)
            plain = args, kwargs
            if is_transformed:
                plain = replace(plain, _behind)
            call.measure_before(inputs, *plain)
            pole = pole_of(call.known_as, *plain)
            call.takes_from(self._made_by(inputs if pole is None else [pole]))
        edit = self._edits.get((name, place))
        result = func(*args, **kwargs) if edit is None else edit(func, args, kwargs)
        changed = args[0] if result is None or name == "assignment" else result
        with torch.no_grad(), _modules.outside_transforms():
            outputs = [_modules.behind_transforms(t) for _, t in floating_in(changed)]
            call.note_dtype(outputs)
            self._made.update((id(tensor), (weakref.ref(tensor), call)) for tensor in outputs)
            self._look(call, inputs, outputs, *plain)
            for tensor in outputs:
                self._claim(tensor.grad_fn, call)
        return result

    def _made_by(self, tensors: Iterable[Tensor]) -> list[OperationCall]:
        found = ((tensor, self._made.get(id(tensor))) for tensor in tensors)
        return [made[1] for tensor, made in found if made is not None and made[0]() is tensor]

    # -- forward -------------------------------------------------------------------------------------------------------

    def _look(self, call: OperationCall, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any) -> None:
        wanted = call.key in self._wanted
        if not outputs or (not wanted and bool(all_finite(outputs))):
            return
        call.measure(inputs, outputs, args, kwargs)
        if call.takes_nonfinite:
            call.came_from(self.maker(tensor) for tensor in inputs if not bool(all_finite([tensor])))
        if wanted:
            self.measured[call.key] = call
        if call.num_nonfinite and any(map(self._is_of_gradients, inputs)):  # norms, clipping, logging: no cause
            self._of_gradients.update((id(tensor), weakref.ref(tensor)) for tensor in outputs)
        elif call.num_nonfinite:
            (self.bad_in_backward if self._in_backward else self.bad).append(call)
            for tensor in outputs:
                self._remember(tensor, call)

    def _is_of_gradients(self, tensor: Tensor) -> bool:
        known = self._of_gradients.get(id(tensor))
        return (known is not None and known() is tensor) or any(p.grad is tensor for p in self._parameters)

    def _remember(self, tensor: Tensor, call: OperationCall) -> None:
        self._makers[id(tensor)] = weakref.ref(tensor), call
        try:
            self._by_storage[tensor.untyped_storage().data_ptr()] = call
        except Exception:  # a sparse tensor has none
            return

    # -- backward ------------------------------------------------------------------------------------------------------

    def _claim_inputs(self, inputs: list[Tensor], place: Place | None) -> None:
        """Name the nodes that nobody has seen being made: those of custom Functions."""
        for tensor in inputs:
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                own = isinstance(node, BackwardCFunction)
                name = node.name().removesuffix("Backward").removesuffix("Backward0")
                call = OperationCall(Key(name, place, -1), self._number, None, known_as="a Function" if own else "")
                self._claim(node, call)

    def _claim(self, node: Any, call: OperationCall) -> None:
        """Watch the backward of an operation: all nodes down to those of other operations."""
        queue = [node]
        while queue:
            node = queue.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._nodes[node] = call
            self._handles.append(node.register_hook(_Hook(self, call)))
            queue += [inner for inner, _ in node.next_functions]

    def note_backward(self, call: OperationCall, computed: Any, arrived: Any) -> None:
        """Look at what a node computed, until the first that is not finite."""
        if self.first_backward is not None:
            return
        with torch.no_grad(), _modules.outside_transforms():
            given = [_modules.behind_transforms(t) for _, t in floating_in(arrived)]
            made = [_modules.behind_transforms(t) for _, t in floating_in(computed)]
            is_sum = not bool(all_finite(given))
            bad = given if is_sum else [t for t in made if not bool(all_finite([t]))]
            if bad:
                self.first_backward = BackwardCall(call, is_sum, bad[0].dtype, shape_of(bad[0]), largest_of(given))


def _behind(value: Any) -> Any:
    return _modules.behind_transforms(value) if isinstance(value, Tensor) else value


@final
class _Hook:
    """What a node of the graph calls after its backward; a weak reference, for the graph may outlive the watch."""

    def __init__(self, watch: OperationWatch, call: OperationCall) -> None:
        self._watch, self._call = weakref.ref(watch), call

    def __call__(self, computed: Any, arrived: Any) -> None:
        watch = self._watch()
        if watch is not None:
            watch.note_backward(self._call, computed, arrived)
