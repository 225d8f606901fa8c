"""Watch every operation of a forward and backward, to find the one that made the first non-finite value or gradient."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import final, override

from lightning_amp._compat import _modules, _sharding
from lightning_amp._containers import replace, tensors_in
from lightning_amp._user_line import Place
from lightning_amp.numerics import extremes, is_finite, output_sums, outside_modes
from lightning_amp.tracing._operation_calls import (
    FUNCTION,
    BackwardCall,
    Beside,
    Key,
    OperationCall,
    largest_of,
    smallest_magnitude,
)
from lightning_amp.tracing._operations import POLES, Known, known_operation, plain, pole_of
from lightning_amp.tracing._places import running_code
from lightning_amp.tracing._trace import floating, shape_of

Edit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A replacement for an operation: it is called with the operation and its arguments, and returns the result."""

_MAX_BYTES = 2**32
"""Memory for copies of results; operations that run after this memory is used up are not compared."""


@final
class OperationWatch(TorchFunctionMode):
    """Context that watches operations of torch on tensors, and their backwards.

    It sees the calls in the code, but nothing inside an operation such as `cross_entropy` or the forward of an autograd
    Function.

    Args:
        module: The outermost module, for the names of modules; `None` if `running` provides the names.
        boundary: File of the code that runs the step; callers of that file are not reported as places.
        wanted: Operations to measure although their results are finite.
        edits: Replacements for some operations, by name and place.
        only_edits: Apply the edits and watch nothing.
        running: Names of the running modules, outermost first. With it, every result is kept for a
            comparison, and nothing else is watched.
        reference: A watch of the same step in fp32: compare each result with the result that it kept.

    Cost: each result is read by the host, some 30 us an operation and 10 us a node of its backward. Use it to analyse a
    failed step, not in every step.

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
        self.calls: list[OperationCall] = []  # all operations of a comparison, in order
        self.bad: list[OperationCall] = []  # operations of the forward with non-finite results, in order
        self.bad_in_backward: list[OperationCall] = []  # the same in the backward of the user's own Functions
        self.measured: dict[Key, OperationCall] = {}  # wanted operations, finite or not; all in a comparison
        self.first_backward: BackwardCall | None = None  # the first with a non-finite gradient, of a finite loss
        self.made_loss: OperationCall | None = None  # the operation that made the first non-finite loss
        self._names = {id(m): _modules.plain_name(name) for name, m in module.named_modules()}
        self._parameters = list(module.parameters())
        self._boundary = boundary
        self._wanted, self._edits = set(wanted), dict(edits or {})
        self._only_edits, self._edited = only_edits, {name for name, _ in self._edits}
        self._running, self._reference = running, reference
        self._in_backward = False
        self._occurrences: Counter[tuple[str, Place | None]] = Counter()
        self._number = 0
        self._num_bytes = 0
        self._made = WeakTensorKeyDictionary()  # the operation that made a tensor
        self._made_bad = WeakTensorKeyDictionary()  # the same, only for tensors that are not finite
        self._of_gradients = WeakTensorKeyDictionary()  # non-finite tensors that the step's code computed from `.grad`
        self._by_storage: dict[int, OperationCall] = {}
        self._nodes: dict[Any, OperationCall] = {}
        self._handles: list[Any] = []
        self._itself: weakref.ref[OperationWatch] = weakref.ref(self)

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for held in (self._handles, self._nodes, self._made_bad, self._made, self._by_storage):
            held.clear()

    def note_loss(self, loss: Tensor) -> None:
        """Record the operation that made a loss, before its backward, if this is the first non-finite loss."""
        self._claim_inputs([loss], None)
        if self.made_loss is None and not is_finite(loss):
            self.made_loss = self.maker(loss)

    @contextmanager
    def in_backward(self) -> Generator[None]:
        """Count operations inside as part of a backward: repeated forwards, and the user's own Functions."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def maker(self, tensor: Tensor) -> OperationCall | None:
        """Return the operation that made a tensor not finite, while the context is entered."""
        call: OperationCall | None = self._made_bad.get(tensor)
        with suppress(Exception):  # a sparse tensor has no storage
            call = call or self._by_storage.get(_sharding.local(tensor).untyped_storage().data_ptr())
        return call

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
        key = Key(known.name, place, self._occurrences[known.name, place])
        self._occurrences[known.name, place] += 1
        self._number += 1
        if self._only_edits:
            return self._run(key, func, args, kwargs)
        if self._running is not None:
            return self._beside_reference(key, known, func, args, kwargs)
        is_transformed = _modules.inside_transforms()
        with _modules.outside_function_modes(), _modules.outside_transforms():
            seen = replace((args, kwargs), _behind) if is_transformed else (args, kwargs)
            call, taken = self._before(key, module, known, *seen)
        result = self._run(key, func, args, kwargs)
        with _modules.outside_function_modes(), _modules.outside_transforms():
            self._after(call, taken, args[0] if result is None or known.name == "assignment" else result, *seen)
        return result

    def _run(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        edit = self._edits.get((key.name, key.place)) if self._edits else None
        return func(*args, **kwargs) if edit is None else edit(func, args, kwargs)

    def _made_by(self, tensors: Iterable[Tensor]) -> list[OperationCall]:
        return [call for tensor in tensors if (call := self._made.get(tensor)) is not None]

    # -- forward -------------------------------------------------------------------------------------------------------

    def _before(
        self, key: Key, module: str | None, known: Known, args: Any, kwargs: Any
    ) -> tuple[OperationCall, list[Tensor]]:
        """Record an operation that is about to run; return it and its inputs, with copies of those it overwrites."""
        inputs = floating(args, kwargs)
        self._claim_inputs(inputs, key.place)
        pole = pole_of(known.known_as, args, kwargs)
        makers = self._made_by(inputs if pole is None else [pole])
        smallest = None if pole is None else smallest_magnitude(known.known_as, pole)
        call = OperationCall(key, self._number, module, known.known_as, makers, smallest, known.is_collective)
        if known.is_in_place and args:
            written = floating(args[0])
            inputs = [*map(_copy, written), *inputs[len(written) :]]
        return call, inputs

    def _after(self, call: OperationCall, inputs: list[Tensor], changed: Any, args: Any, kwargs: Any) -> None:
        outputs = floating(changed)
        if not outputs:
            return
        call.gives(outputs[0].dtype)
        if call.is_collective:
            outputs = [*map(_arrived, outputs)]
        self._made.update(dict.fromkeys(outputs, call))
        if call.key in self._wanted or not all(map(is_finite, outputs)):
            self._measure(call, inputs, outputs, args, kwargs)
        for tensor in outputs:
            self._claim(tensor.grad_fn, call)

    def _measure(
        self, call: OperationCall, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        call.measure(inputs, outputs, args, kwargs)
        taken = floating(args, kwargs)  # the present tensors, where `inputs` has copies of their earlier values
        if call.takes_nonfinite:
            pairs = zip(inputs, taken, strict=True)
            call.came_from(self.maker(tensor) for before, tensor in pairs if not is_finite(before))
        if call.key in self._wanted:
            self.measured[call.key] = call
        if call.num_nonfinite and any(map(self._is_of_gradients, taken)):  # norms, clipping and logging are not causes
            self._of_gradients.update(dict.fromkeys(outputs, call))
        elif call.num_nonfinite:
            (self.bad_in_backward if self._in_backward else self.bad).append(call)
            for tensor in outputs:
                self._made_bad[tensor] = call
                with suppress(Exception):  # a sparse tensor has no storage
                    self._by_storage[_sharding.local(tensor).untyped_storage().data_ptr()] = call

    def _is_of_gradients(self, tensor: Tensor) -> bool:
        return tensor in self._of_gradients or any(p.grad is tensor for p in self._parameters)

    # -- beside a reference --------------------------------------------------------------------------------------------

    def _beside_reference(self, key: Key, known: Known, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and keep its result, or compare it with the reference."""
        taken = _dense(tensor for _, tensor in tensors_in([args, kwargs]))
        takes_bad = any(map(_is_bad, taken))  # copied before an in-place operation
        makers = self._made_by(taken)
        result = func(*args, **kwargs)
        outputs = _dense(result if isinstance(result, (tuple, list)) else [result])
        if not outputs or key.place is None:  # operations without a place run in Lightning's hooks
            return result
        made, copied, sums, fp32_run = outputs[0], None, None, None
        if self._reference is None:
            self._num_bytes += made.numel() * 4
            copied = made.detach().clone() if self._num_bytes <= _MAX_BYTES else None
        else:
            fp32_run = self._reference.measured.get(key)
            known_output = None if fp32_run is None or fp32_run.beside is None else fp32_run.beside.output
            if known_output is not None and known_output.shape == made.shape:
                sums = output_sums(known_output, made)
        beside = Beside(
            known.written,
            is_blameless=made.numel() == 1 or not made.is_floating_point(),
            takes_exact=any(
                t.numel() > 1 and not self._made_by([t]) and not isinstance(t, nn.Parameter) for t in taken
            ),
            is_bad=_is_bad(made, poles=plain(key.name) in POLES),
            takes_bad=takes_bad,
            output=copied,
            sums=sums,
            reference=fp32_run,
        )
        module = next((name for name in reversed(self._running or ()) if name), None)
        call = OperationCall(key, self._number, module, known.known_as, makers, beside=beside)
        self.measured[key] = call
        self.calls.append(call)
        self._made.update(dict.fromkeys(outputs, call))
        return result

    # -- backward ------------------------------------------------------------------------------------------------------

    def _claim_inputs(self, inputs: list[Tensor], place: Place | None) -> None:
        """Name the autograd nodes of inputs that no watched operation made, such as the user's own Functions."""
        for tensor in inputs:
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                own = isinstance(node, BackwardCFunction)
                name = node.name().removesuffix("Backward").removesuffix("Backward0")
                call = OperationCall(
                    Key(name, place, -1), self._number, None, FUNCTION if own else name,
                    is_collective=_is_function_of_torch(node),
                )  # fmt: skip
                self._claim(node, call)

    def _claim(self, node: Any, call: OperationCall) -> None:
        """Watch the backward of an operation: all its nodes, as far as the nodes of other operations."""
        queue = [node]
        while queue:
            node = queue.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._nodes[node] = call
            self._handles.append(node.register_hook(partial(_note_backward, self._itself, call)))
            queue += [inner for inner, _ in node.next_functions]

    def note_backward(self, call: OperationCall, computed: Any, arrived: Any) -> None:
        """Record the backward of a node if its gradient is the first that is not finite."""
        if self.first_backward is not None or self.made_loss is not None:
            return
        with _modules.outside_function_modes(), _modules.outside_transforms():
            given, made = floating(arrived), floating(computed)
            is_sum = not all(map(is_finite, given))
            bad = given if is_sum else [t for t in made if not is_finite(t)]
            if bad:
                self.first_backward = BackwardCall(call, is_sum, bad[0].dtype, shape_of(bad[0]), largest_of(given))


def _note_backward(watch: weakref.ref[OperationWatch], call: OperationCall, computed: Any, arrived: Any) -> None:
    """Call :meth:`OperationWatch.note_backward`, unless the watch no longer exists."""
    if (found := watch()) is not None:
        found.note_backward(call, computed, arrived)


def _copy(tensor: Tensor) -> Tensor:
    with outside_modes(tensor):
        return tensor.detach().clone()


def _behind(value: Any) -> Any:
    return _modules.behind_transforms(value) if isinstance(value, Tensor) else value


def _dense(values: Iterable[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and not v.is_complex()]


def _is_bad(tensor: Tensor, *, poles: bool = False) -> bool:
    """Return whether a value is NaN or plus infinity; at a pole minus infinity counts too, because it is no mask."""
    ends = [end.item() for end in extremes(tensor)]
    return not all(math.isfinite(end) if poles else end < math.inf for end in ends)


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
