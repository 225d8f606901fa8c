"""What may help where half precision has rounded an argument to 0: to keep the digits in an earlier operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import final

from lightning_amp.numerics import HALF_DTYPES, all_finite
from lightning_amp.reports import Remedy
from lightning_amp.shadow._remedies import Trial, Trials, in_fp32
from lightning_amp.tracing import CASTS, Edit, Operation, OperationCall, Place

_MOST_MAKERS = 4
_LOGARITHMS = {"log": "sub", "log1p": "neg"}
"""Logarithms, and what is done to `p` before them in `log(1 - p)`."""


def trials_of_digits(
    operation: Operation | None, call: OperationCall | None, alike: Sequence[OperationCall] = ()
) -> Trials:
    """Try float32 in what made the argument, the latest operation first, until one works.

    Args:
        operation: That is to blame, for a result that fp32 has.
        call: The same.
        alike: Others that fail in the same way, on other lines.

    """
    if operation is None or call is None:
        return
    is_cast_back = operation.in_backward and operation.name in CASTS
    if operation.kind not in ("zero", "negative") and not is_cast_back:
        return
    lost: tuple[str, str] | None = None
    modules = {operation.module}
    in_half = (maker for maker in _makers(call) if maker.dtype in HALF_DTYPES and _place(maker) != _place(call))
    for maker in islice(in_half, _MOST_MAKERS):
        named, probe = (maker.name, _text(maker.key.place)), _Probe()
        others = [twin for other in alike if (twin := _twin(maker, other)) is not None]
        edits: dict[tuple[str, Place | None], Edit] = {_place(one): in_fp32 for one in (maker, *others)}
        elsewhere = {o.key.place.short: None for o in others if o.key.place and o.key.place != maker.key.place}
        values = (*named, *(lost or named), *elsewhere)
        worked = yield Trial(Remedy("source in fp32", values), edits={_place(call): probe, **edits})
        if lost is None and probe.is_finite and not operation.in_backward:  # where its result is finite all the same
            lost = named
        if maker.module and maker.module not in modules:
            modules.add(maker.module)  # a linear layer casts what it gets: it needs its own rule
            worked |= yield Trial(Remedy("fp32_modules", (maker.module,)), rules=(maker.module,))
        if worked:
            return


def trials_of_logits(call: OperationCall | None, alike: Sequence[OperationCall] = ()) -> Trials:
    """Try `logsigmoid` in the place of the logarithm of a sigmoid, or of one minus it, where `call` is that."""
    form = "" if call is None else _form(call)[0]
    if call is None or not form:
        return
    pair, edits = _LogSigmoid(call.name), dict[tuple[str, Place | None], Edit]()
    others = [other for other in alike if _form(other)[0]]
    for one in (call, *others):
        sigmoid = _form(one)[1]
        assert sigmoid is not None
        edits |= {_place(sigmoid): pair.take_sigmoid, _place(one): pair.take_logarithm}
    elsewhere = [other.key.place.short for other in others if other.key.place]
    yield Trial(Remedy("logsigmoid", (form, *elsewhere)), edits=edits)


def _form(call: OperationCall) -> tuple[str, OperationCall | None]:
    """Return what `logsigmoid` would take, and the sigmoid: `"x"` or `"-x"`; empty if it is no logarithm of one."""
    if call.name not in _LOGARITHMS:
        return "", None
    form, sigmoid = "x", _maker(call)
    if sigmoid is not None and sigmoid.name == _LOGARITHMS[call.name]:
        form, sigmoid = "-x", _maker(sigmoid)
    return (form, sigmoid) if sigmoid is not None and sigmoid.name == "sigmoid" else ("", None)


def _place(call: OperationCall) -> tuple[str, Place | None]:
    return call.key.name, call.key.place


def _text(place: Place | None) -> str:
    return "" if place is None else str(place)


def _makers(call: OperationCall) -> Iterator[OperationCall]:
    """Iterate over the operations whose results went in, the nearest first."""
    seen, queue = {call.number}, [*call.makers]
    while queue:
        maker = queue.pop(0)
        if maker.number not in seen:
            seen.add(maker.number)
            yield maker
            queue += maker.makers


def _maker(call: OperationCall) -> OperationCall | None:
    """Return the one operation whose result went in, casts left out."""
    while len(call.makers) == 1:
        call = call.makers[0]
        if call.name not in CASTS:
            return call
    return None


def _twin(maker: OperationCall, other: OperationCall) -> OperationCall | None:
    return next((one for one in islice(_makers(other), _MOST_MAKERS) if one.name == maker.name), None)


@final
class _Probe:
    """Does the work of an operation as it is, and notes whether all of its results were finite."""

    def __init__(self) -> None:
        self.is_finite = True

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.is_finite &= bool(all_finite([result]))
        return result


@final
class _LogSigmoid:
    """Two edits that know of each other."""

    def __init__(self, logarithm: str) -> None:
        self._minus_one = logarithm == "log1p"
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def take_sigmoid(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep what goes in, and what comes out."""
        result = func(*args, **kwargs)
        self._pairs.append((args[0] if args else kwargs["input"], result))
        return result

    def take_logarithm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the same logarithm, computed from what went into the sigmoid; another one as it is."""
        argument = args[0] if args else kwargs["input"]
        for logits, probability in reversed(self._pairs):
            p = probability.to(argument.dtype)
            if torch.equal(argument, -p if self._minus_one else 1 - p):
                return functional.logsigmoid(-logits)
            if not self._minus_one and torch.equal(argument, p):
                return functional.logsigmoid(logits)
        return func(*args, **kwargs)
