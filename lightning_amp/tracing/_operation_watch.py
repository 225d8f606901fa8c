"""Every operation of a forward and backward: which one made the first value, or gradient, that is not finite."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import replace, tensors_in
from lightning_amp._user_line import Place
from lightning_amp.numerics import extremes, is_finite, outside_modes
from lightning_amp.tracing._operation_calls import (
    FUNCTION,
    BackwardCall,
    Beside,
    Key,
    OperationCall,
    largest_of,
)
from lightning_amp.tracing._operations import POLES, Known, known_operation, plain, pole_of
from lightning_amp.tracing._places import running_code
from lightning_amp.tracing._trace import floating, shape_of

Edit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Does the work of an operation in another way: gets it, and its arguments."""

_MAX_BYTES = 2**32
"""What the copies of results may take; later operations are not compared."""


@final
class OperationWatch(TorchFunctionMode):
    """Context in which operations of torch on tensors are watched, and their backwards.

    What is inside of an operation, such as `cross_entropy`, is not looked at; nor are custom autograd Functions in
    their forward.

    Args:
        module: Names the modules whose code runs; `None` where `running` does.
        boundary: File of the code that runs the step: no place above it counts.
        wanted: Operations to measure although their results are finite.
        edits: What to do in the place of some operations, by name and place.
        only_edits: Look at nothing else.
        running: Names of the modules that are running, outermost first: each result is kept, for a comparison.
        reference: Of the same step in fp32: each result is compared with what it has kept.

    Attributes:
        calls: All operations, in order, if results are kept or compared.
        bad: Operations with results that are not finite, in order; of the forward.
        bad_in_backward: Those that a backward ran, in a Function of the user's own.
        measured: Those that were wanted and ran, finite or not.
        first_backward: The first backward whose gradient is not finite, of a loss that is.
        made_loss: What made the first loss that is not finite.

    Cost: each result is read by the host, some 30 us an operation and 10 us a node of its backward. For looking into a
    failure, not for every step.

    """

    def __init__(
        self,
        module: nn.Module | None,
        boundary: str,
        wanted: Iterable[Key] = (),
        edits: Mapping[tuple[str, Place | None], Edit] | None = None,
        *,
        only_edits: bool = False,
        running: Sequence[str] | None = None,
        reference: OperationWatch | None = None,
    ) -> None:
        super().__init__()
        module = module or nn.Identity()
        self.calls: list[OperationCall] = []
        self._compares, self._reference = running is not None, reference
        self._running: Sequence[str] = () if running is None else running
        self._known: dict[Key, OperationCall] = {}
        self._num_bytes = 0
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
        self._only_edits, self._edited = only_edits, {name for name, _ in self._edits}
        self._occurrences: Counter[tuple[str, Place | None]] = Counter()
        self._number = 0
        self._makers: dict[int, tuple[weakref.ref[Tensor], OperationCall]] = {}  # of what is not finite
        self._made: dict[int, tuple[weakref.ref[Tensor], OperationCall]] = {}
        self._by_storage: dict[int, OperationCall] = {}
        self._nodes: dict[Any, OperationCall] = {}
        self._handles: list[Any] = []
        self._itself: weakref.ref[OperationWatch] = weakref.ref(self)

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
        if self.made_loss is None and not is_finite(loss):
            self.made_loss = self.maker(loss)

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
        known = known_operation(func)
        if known is None or (self._only_edits and known.name not in self._edited):
            return func(*args, **kwargs)
        running = running_code(self._names, self._boundary)
        if running is None:
            return func(*args, **kwargs)
        place, module = running
        name = known.name
        occurrence = self._occurrences[name, place]
        self._occurrences[name, place] = occurrence + 1
        call = OperationCall(Key(name, place, occurrence), self._number, module, known.known_as)
        self._number += 1
        if self._only_edits:
            return self._run(call, func, args, kwargs)
        if self._compares:
            return self._beside_reference(call, known, func, args, kwargs)
        is_transformed = _modules.inside_transforms()
        with _modules.outside_function_modes(), _modules.outside_transforms():
            seen = replace((args, kwargs), _behind) if is_transformed else (args, kwargs)
            taken = self._before(call, known, *seen)
        result = self._run(call, func, args, kwargs)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            self._after(call, taken, args[0] if result is None or known.name == "assignment" else result, *seen)
        return result

    def _run(self, call: OperationCall, func: Any, args: Any, kwargs: Any) -> Any:
        edit = self._edits.get((call.name, call.key.place)) if self._edits else None
        return func(*args, **kwargs) if edit is None else edit(func, args, kwargs)

    def _made_by(self, tensors: Iterable[Tensor]) -> list[OperationCall]:
        found = ((tensor, self._made.get(id(tensor))) for tensor in tensors)
        return [made[1] for tensor, made in found if made is not None and made[0]() is tensor]

    # -- forward -------------------------------------------------------------------------------------------------------

    def _before(self, call: OperationCall, known: Known, args: Any, kwargs: Any) -> list[Tensor]:
        """Note what goes in, and return it: a copy of what is about to be overwritten."""
        inputs = floating(args, kwargs)
        self._claim_inputs(inputs, call.key.place)
        pole = pole_of(call.known_as, args, kwargs)
        call.takes(self._made_by(inputs if pole is None else [pole]), pole)
        if not known.is_in_place or not args:
            return inputs
        written = floating(args[0])
        return [*map(_copy, written), *inputs[len(written) :]]

    def _after(self, call: OperationCall, inputs: list[Tensor], changed: Any, args: Any, kwargs: Any) -> None:
        outputs = floating(changed)
        if not outputs:
            return
        call.gives(outputs[0].dtype)
        for tensor in outputs:
            self._made[id(tensor)] = weakref.ref(tensor), call
        if call.key in self._wanted or not all(map(is_finite, outputs)):
            self._measure(call, inputs, outputs, args, kwargs)
        for tensor in outputs:
            self._claim(tensor.grad_fn, call)

    def _measure(
        self, call: OperationCall, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        call.measure(inputs, outputs, args, kwargs)
        taken = floating(args, kwargs)  # what is there now, where `inputs` has copies of what was there
        if call.takes_nonfinite:
            pairs = zip(inputs, taken, strict=True)
            call.came_from(self.maker(tensor) for before, tensor in pairs if not is_finite(before))
        if call.key in self._wanted:
            self.measured[call.key] = call
        if call.num_nonfinite and any(map(self._is_of_gradients, taken)):  # norms, clipping, logging: no cause
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

    # -- beside a reference --------------------------------------------------------------------------------------------

    def _beside_reference(self, call: OperationCall, known: Known, func: Any, args: Any, kwargs: Any) -> Any:
        taken = [t for _, t in tensors_in([args, kwargs]) if t.layout is torch.strided and not t.is_complex()]
        takes_bad = any(map(_is_bad, taken))  # before an operation in place
        sources = self._made_by(taken)
        result = func(*args, **kwargs)
        made = next(_dense(result), None)
        if made is None or call.key.place is None:  # in the hooks of Lightning
            return result
        module = next((name for name in reversed(self._running) if name), None)
        exact = any(t.numel() > 1 and not self._made_by([t]) and not isinstance(t, nn.Parameter) for t in taken)
        beside = Beside(
            known.written,
            made.numel() == 1 or not made.is_floating_point(),
            exact,
            _is_bad(made, poles=plain(call.name) in POLES),
            takes_bad,
        )
        call.is_compared(sources, module, beside)
        if self._reference is None:
            self._num_bytes += made.numel() * 4
            if self._num_bytes <= _MAX_BYTES:
                beside.keep(made)
            self._known[call.key] = call
        else:
            beside.compare(self._reference._known.get(call.key), made)
        self.calls.append(call)
        for tensor in _dense(result):
            self._made[id(tensor)] = weakref.ref(tensor), call
        return result

    # -- backward ------------------------------------------------------------------------------------------------------

    def _claim_inputs(self, inputs: list[Tensor], place: Place | None) -> None:
        """Name the nodes that nobody has seen being made: those of custom Functions."""
        for tensor in inputs:
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                own = isinstance(node, BackwardCFunction)
                name = node.name().removesuffix("Backward").removesuffix("Backward0")
                self._claim(node, OperationCall(Key(name, place, -1), self._number, None, FUNCTION if own else name))

    def _claim(self, node: Any, call: OperationCall) -> None:
        """Watch the backward of an operation: all nodes down to those of other operations."""
        queue = [node]
        while queue:
            node = queue.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._nodes[node] = call
            self._handles.append(node.register_hook(partial(_note_backward, self._itself, call)))
            queue += [inner for inner, _ in node.next_functions]

    def note_backward(self, call: OperationCall, computed: Any, arrived: Any) -> None:
        """Look at what a node computed, until the first that is not finite."""
        if self.first_backward is not None or self.made_loss is not None:
            return
        with _modules.outside_function_modes(), _modules.outside_transforms():
            given, made = floating(arrived), floating(computed)
            is_sum = not all(map(is_finite, given))
            bad = given if is_sum else [t for t in made if not is_finite(t)]
            if bad:
                self.first_backward = BackwardCall(call, is_sum, bad[0].dtype, shape_of(bad[0]), largest_of(given))


def _note_backward(watch: weakref.ref[OperationWatch], call: OperationCall, computed: Any, arrived: Any) -> None:
    """Do what a node of the graph asks for after its backward; it may outlive the watch."""
    if (found := watch()) is not None:
        found.note_backward(call, computed, arrived)


def _copy(tensor: Tensor) -> Tensor:
    with outside_modes(tensor):
        return tensor.detach().clone()


def _behind(value: Any) -> Any:
    return _modules.behind_transforms(value) if isinstance(value, Tensor) else value


def _dense(result: Any) -> Iterator[Tensor]:
    values = result if isinstance(result, (tuple, list)) else (result,)
    return (v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and not v.is_complex())


def _is_bad(tensor: Tensor, *, poles: bool = False) -> bool:
    """Return whether a value is NaN or plus infinity; at a pole, minus infinity is no mask either."""
    ends = [end.item() for end in extremes(tensor)]
    return not all(math.isfinite(end) if poles else end < math.inf for end in ends)
