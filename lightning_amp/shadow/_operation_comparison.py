"""What each operation of a step gives in mixed precision, beside what it gives in fp32; with the user's line."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import final, override

from lightning_amp._containers import tensors_in
from lightning_amp.shadow._output_comparison import OutputComparison, output_sums
from lightning_amp.tracing import Place, user_place

_MAX_BYTES = 2**32
"""What the copies of results may take; later operations are not compared."""

COMPARISONS_WITH_TARGETS = {"sub", "__sub__", "rsub", "__rsub__", "sub_", "subtract", "mse_loss", "l1_loss",
                            "smooth_l1_loss", "huber_loss", "pairwise_distance", "cosine_similarity"}  # fmt: skip
"""A good prediction minus its target is small, and its error is a large part of it: nothing is wrong with that."""


_POLES = {"log", "log_", "log2", "log10", "logit", "xlogy", "div", "__truediv__", "reciprocal"}
"""Operations whose negative infinity is no mask."""


class _Key(NamedTuple):
    name: str
    place: Place | None
    occurrence: int


@final
@dataclass(slots=True)
class OperationOutput:
    """What one operation gave.

    Attributes:
        name: Of the operation: `"cos"`.
        place: The user's line.
        module: Qualified name of the innermost module that was running; `None` in the step itself.
        is_blameless: Whether it is a single number (a loss, a count), or a decision (an index, a comparison): where two
            candidates are close, the smallest error makes another one of it.
        output: The result; a copy in the reference.
        sources: Results of operations before it that went in.
        takes_exact: Whether more than numbers went in that come from no operation: the batch, a parameter.
        sums: Against the reference, see :func:`~lightning_amp.shadow._output_comparison.output_sums`.
        is_bad: Whether a value is NaN or plus infinity, bool [].
        takes_bad: Whether one that went in is.

    """

    name: str
    place: Place | None
    module: str | None
    is_blameless: bool
    sources: list[OperationOutput]
    takes_exact: bool
    is_bad: Tensor
    takes_bad: Tensor
    output: Tensor | None = None
    sums: Tensor | None = None
    reference: OperationOutput | None = None

    def keep(self, output: Tensor) -> None:
        """Keep a copy of the result."""
        self.output = output.detach().clone()

    def compare(self, reference: OperationOutput | None, output: Tensor) -> None:
        """Compare the result with that of the same operation in fp32."""
        self.reference = reference
        known = None if reference is None else reference.output
        if known is not None and known.shape == output.shape:
            self.sums = output_sums(known, output)


@final
class OperationComparison(TorchFunctionMode):
    """Context in which operations are kept (without a reference), or compared with those that were.

    Args:
        modules: Knows which module is running: its `watching` context is entered, too.
        boundary: File of the code that runs the step.
        reference: Of the same step in fp32.

    Attributes:
        calls: In order.

    """

    def __init__(self, modules: OutputComparison, boundary: str, reference: OperationComparison | None = None) -> None:
        super().__init__()
        self.calls: list[OperationOutput] = []
        self._modules, self._boundary, self._reference = modules, boundary, reference
        self._known: dict[_Key, OperationOutput] = {}
        self._counts: Counter[tuple[str, Place | None]] = Counter()
        self._made: dict[int, tuple[weakref.ref[Tensor], OperationOutput]] = {}
        self._num_bytes = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = [t for _, t in tensors_in([args, kwargs]) if t.layout is torch.strided and not t.is_complex()]
        sources = [source for t in taken if (source := self._source(t)) is not None]
        takes_bad = _any_bad(taken)  # before an operation in place
        result = func(*args, **kwargs)
        made = next(_dense(result), None)
        place = None if made is None else user_place(self._boundary)
        if made is None or place is None:  # measured by this package, or in the hooks of Lightning
            return result
        name = str(getattr(func, "__name__", func))
        exact = any(t.numel() > 1 and self._source(t) is None and not isinstance(t, nn.Parameter) for t in taken)
        module = next((name for name in reversed(self._modules.running) if name), None)
        call = OperationOutput(
            name,
            place,
            module,
            made.numel() == 1 or not made.is_floating_point(),
            sources,
            exact,
            _any_bad([made], poles=name in _POLES),
            takes_bad,
        )
        self._counts[name, place] += 1
        key = _Key(name, place, self._counts[name, place])
        if self._reference is None:
            self._known[key] = call
            self._num_bytes += made.numel() * 4
            if self._num_bytes <= _MAX_BYTES:
                call.keep(made)
        else:
            call.compare(self._reference._known.get(key), made)
        self.calls.append(call)
        for tensor in _dense(result):
            self._made[id(tensor)] = weakref.ref(tensor), call
        return result

    def _source(self, tensor: Tensor) -> OperationOutput | None:
        found = self._made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


def _dense(result: Any) -> Iterator[Tensor]:
    values = result if isinstance(result, (tuple, list)) else (result,)
    return (v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and not v.is_complex())


@torch.no_grad()
def _any_bad(tensors: list[Tensor], *, poles: bool = False) -> Tensor:
    found = [t for t in tensors if t.is_floating_point()]
    flags = [(~torch.isfinite(t) if poles else torch.isnan(t) | torch.isposinf(t)).any().cpu() for t in found]
    return torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
