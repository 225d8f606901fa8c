"""The remedies for a step that is not finite, and the order in which they are tried.

Each remedy has a section: how it edits operations, and the strengths that are tried. A new one also needs a kind in
`findings/_remedy.py` and its sentence in `reports/_overflow_words.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import final

from lightning_amp import _containers
from lightning_amp.causes._attempts import Attempt, first_that_works
from lightning_amp.findings import Remedy
from lightning_amp.numerics import HALF_DTYPES, all_finite
from lightning_amp.shadow import Lockstep
from lightning_amp.tracing import (
    CASTS,
    EXPONENTIALS,
    NORMS,
    Diagnosis,
    Edit,
    Operation,
    OperationCall,
    Place,
    argument_of,
)

_Func = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Attempts = Iterable[Attempt[Remedy, bool]]
_Edits = Mapping[tuple[str, Place | None], Edit]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A step that is not finite."""

    found: Diagnosis
    call: OperationCall | None  # the operation of the replay that the diagnosis names
    alike: Sequence[OperationCall]  # operations on other lines that fail in the same way
    takers: Sequence[str]  # modules that its result went through, in order
    precision: str
    choices: Sequence[str]  # precisions that the device runs
    scale: float  # loss scale at which the step failed
    fitting: float  # scale at which the largest true gradient fits
    is_finite: Callable[..., bool]  # runs the step with a remedy

    @property
    def operation(self) -> Operation | None:
        """Return the operation that the diagnosis names, if it is known."""
        return self.found.operation

    def attempt(self, remedy: Remedy, **how: object) -> Attempt[Remedy, bool]:
        """Return an attempt: the step with this remedy, not yet run."""
        return Attempt(remedy, partial(self.is_finite, **how))


def try_remedies(ranks: Lockstep, case: Case) -> list[Remedy]:
    """Try the remedies that fit the diagnosis. For each remedy, try one strength after the other until one works."""
    found, tried = case.found, list[Remedy]()

    def helps(*remedies: Callable[[Case], _Attempts]) -> bool:
        for remedy in remedies:
            tried.extend(one._replace(worked=worked) for one, worked in first_that_works(ranks, remedy(case)))
        return any(remedy.worked for remedy in tried)

    if found.in_fp32 != "finite":
        if found.cause not in ("batch", "weights"):
            helps(_logsigmoid, _finite_mask, _zero_infinity, _clamp, _epsilons_in_any_precision)
        if found.in_fp32 == "not finite" or helps():
            return tried
    if found.cause == "backward" and case.precision == "fp16" and helps(_lower_scale):
        return tried
    tried += _try_sources(ranks, case)
    lost_by = [remedy.values[2] for remedy in tried if remedy.worked and remedy.kind == "source in fp32"]
    if lost_by:
        helps(_logsigmoid)
    helps(_bf16)
    if case.precision != "fp32":
        helps(_fp32_modules)
        if lost_by in ([], ["add"]):  # an epsilon that did not help may only be too small, so that it was rounded away
            helps(_epsilon)
        helps(_clamp, _operation_in_fp32)
    return tried


# -- a precision, modules in fp32, a lower scale -----------------------------------------------------------------------


def _bf16(case: Case) -> _Attempts:
    if case.precision == "fp16" and "bf16" in case.choices:
        yield case.attempt(Remedy("bf16"), precision="bf16")


def _fp32_modules(case: Case) -> _Attempts:
    """Keep modules in fp32: the module of the operation, then the next ones that take its result, then its parent."""
    name = "" if case.operation is None else case.operation.module or ""
    if not name:
        return
    others = list(dict.fromkeys(taker for taker in case.takers if taker and taker != name))
    together = [(name,), *((name, *others[:count]) for count in (1, 2) if len(others) >= count)]
    if parent := name.rpartition(".")[0]:
        together.append((parent,))
    for names in dict.fromkeys(map(_without_inner, together)):
        yield case.attempt(Remedy("fp32_modules", names), rules=names)


_LOWER = (2.0**-2, 2.0**-6, 2.0**-12)


def _lower_scale(case: Case) -> _Attempts:
    """Lower the scale to where the true gradients fit, and further."""
    start = min(case.fitting, case.scale / 2)
    for lower in (start, *(start * factor for factor in _LOWER)):
        remedy = Remedy("scale", (lower,)) if lower >= 1 else Remedy("divisor", (1 / lower,))
        yield case.attempt(remedy, scale=lower)


# -- a finite mask, `zero_infinity`, a clamp ---------------------------------------------------------------------------


def _mask_finitely(func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    """Replace minus infinity by the lowest numbers of the format."""

    def finite(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.masked_fill(torch.isneginf(value), torch.finfo(value.dtype).min / 4)
        return value

    return func(*_containers.replace(args, finite), **_containers.replace(kwargs, finite))


def _finite_mask(case: Case) -> _Attempts:
    if case.call is not None and case.operation is not None and case.operation.kind == "masked":
        yield case.attempt(Remedy("finite mask"), edits={_place(case.call): _mask_finitely})


def _with_zero_infinity(func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    return func(*args[:6], **{**kwargs, "zero_infinity": True})


def _zero_infinity(case: Case) -> _Attempts:
    if case.call is not None and case.call.name == "ctc_loss":
        yield case.attempt(Remedy("zero_infinity"), edits={_place(case.call): _with_zero_infinity})


def _clamped(largest: float, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    argument = argument_of("exp", args, kwargs)
    return _with(argument.clamp(max=largest), argument, func, args, kwargs)


def _clamp(case: Case) -> _Attempts:
    if case.call is not None and case.call.name in EXPONENTIALS:
        for largest in (80.0, 20.0, 10.0, 5.0):
            yield case.attempt(Remedy("clamp", (largest,)), edits={_place(case.call): partial(_clamped, largest)})


# -- an epsilon --------------------------------------------------------------------------------------------------------


def _with_epsilon(name: str, epsilon: float, kind: str, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    """Keep an argument an epsilon away from 0, as the advice says: add it, or clamp an argument that is below 0."""
    argument = argument_of(name, args, kwargs)
    if not isinstance(argument, Tensor):
        return func(*args, **kwargs)
    if name in NORMS:
        away = torch.where(argument.abs() < epsilon, epsilon, argument)  # smooth at 0
    elif name == "div":
        away = torch.where(argument < 0, argument - epsilon, argument + epsilon)
    elif name in ("acos", "asin", "atanh", "logit"):
        away = argument.clamp(epsilon - (name != "logit"), 1 - epsilon)
    elif name == "log1p":
        away = argument.clamp(min=epsilon - 1)
    else:
        away = argument.clamp(min=epsilon) if kind == "negative" else argument + epsilon
    return _with(away, argument, func, args, kwargs)


def _epsilon(case: Case, alike: Sequence[OperationCall] = (), kinds: Sequence[str] = ("zero",)) -> _Attempts:
    call, operation = case.call, case.operation
    if call is None or operation is None or operation.kind not in kinds:
        return
    for epsilon in (1e-8, 1e-6, 1e-4, 1e-3, 1e-2):
        edit = partial(_with_epsilon, call.known_as.removesuffix("_"), epsilon, operation.kind)
        edits = dict.fromkeys(map(_place, (call, *alike)), edit)
        yield case.attempt(Remedy("epsilon", (epsilon, *_lines(alike))), edits=edits)


def _epsilons_in_any_precision(case: Case) -> _Attempts:
    """Add an epsilon on all lines that fail alike, also to arguments below 0: fp32 fails there as well."""
    kinds, operation = ["zero", "negative"], case.operation
    if operation is not None and operation.in_backward and operation.kind_in_fp32 == "zero":
        kinds.append(operation.kind)
    return _epsilon(case, case.alike, kinds)


# -- an operation in fp32, or an earlier one whose result was rounded to 0 ---------------------------------------------


def _in_fp32(func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    """Compute on float32, as with `.float()` on the arguments."""
    return func(*_containers.to_fp32(args, HALF_DTYPES), **_containers.to_fp32(kwargs, HALF_DTYPES))


def _without_autocast(func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    device_type = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
    with torch.autocast(device_type, enabled=False):
        return _in_fp32(func, args, kwargs)


def _operation_in_fp32(case: Case) -> _Attempts:
    call, operation = case.call, case.operation
    if call is not None and operation is not None and operation.is_users and operation.name not in ("to", "to_"):
        yield case.attempt(Remedy("operation in fp32"), edits={_place(call): _in_fp32})
        yield case.attempt(Remedy("operation without autocast"), edits={_place(call): _without_autocast})


@final
class _Probe:
    """Runs an operation unchanged, and notes whether all of its results were finite."""

    def __init__(self) -> None:
        self.is_finite = True

    def __call__(self, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.is_finite &= bool(all_finite([result]))
        return result


_MOST_MAKERS = 4


def _try_sources(ranks: Lockstep, case: Case) -> list[Remedy]:
    """Try float32 in an operation whose result half precision rounds to 0 before it arrives, the latest first."""
    operation, call, tried = case.operation, case.call, list[Remedy]()
    if operation is None or call is None:
        return []
    is_cast_back = operation.in_backward and operation.name in CASTS
    if operation.kind not in ("zero", "negative") and not is_cast_back:
        return []
    lost: tuple[str, str] | None = None
    modules = {operation.module}
    in_half = (maker for maker in _makers(call) if maker.dtype in HALF_DTYPES and _place(maker) != _place(call))
    for maker in islice(in_half, _MOST_MAKERS):
        named, probe = (maker.name, "" if maker.key.place is None else str(maker.key.place)), _Probe()
        others = [twin for other in case.alike if (twin := _twin(maker, other)) is not None]
        elsewhere = dict.fromkeys(_lines([one for one in others if one.key.place != maker.key.place]))
        edits: _Edits = {_place(call): probe, **dict.fromkeys(map(_place, (maker, *others)), _in_fp32)}
        remedy = Remedy("source in fp32", (*named, *(lost or named), *elsewhere))
        now = first_that_works(ranks, [case.attempt(remedy, edits=edits)])
        if lost is None and probe.is_finite and not operation.in_backward:
            lost = named  # float32 here makes the result finite, even if the step still fails
        if maker.module and maker.module not in modules:
            modules.add(maker.module)  # a linear layer casts its input again, so it needs its own rule
            rules = (maker.module,)
            now += first_that_works(ranks, [case.attempt(Remedy("fp32_modules", rules), rules=rules)])
        tried += [one._replace(worked=worked) for one, worked in now]
        if any(worked for _, worked in now):
            break
    return tried


# -- `logsigmoid` ------------------------------------------------------------------------------------------------------


@final
class _LogSigmoid:
    """Two edits: one keeps the arguments of sigmoids, the other computes their logarithms from these."""

    def __init__(self, logarithm: str) -> None:
        self._minus_one = logarithm == "log1p"
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def take_sigmoid(self, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
        """Compute the sigmoid, and keep its argument and its result."""
        result = func(*args, **kwargs)
        self._pairs.append((args[0] if args else kwargs["input"], result))
        return result

    def take_logarithm(self, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
        """Compute the logarithm from the argument of the sigmoid; leave any other logarithm unchanged."""
        argument = args[0] if args else kwargs["input"]
        for logits, probability in reversed(self._pairs):
            p = probability.to(argument.dtype)
            if torch.equal(argument, -p if self._minus_one else 1 - p):
                return functional.logsigmoid(-logits)
            if not self._minus_one and torch.equal(argument, p):
                return functional.logsigmoid(logits)
        return func(*args, **kwargs)


_LOGARITHMS = {"log": "sub", "log1p": "neg"}
"""Logarithms, each with the operation that computes the argument from `p` in `log(1 - p)`."""


def _logsigmoid(case: Case) -> _Attempts:
    """Compute the logarithm of a sigmoid, or of one minus it, by `logsigmoid`."""
    form = "" if case.call is None else _form(case.call)[0]
    if case.call is None or not form:
        return
    pair, edits = _LogSigmoid(case.call.name), dict[tuple[str, Place | None], Edit]()
    others = [other for other in case.alike if _form(other)[0]]
    for one in (case.call, *others):
        sigmoid = _form(one)[1]
        assert sigmoid is not None
        edits |= {_place(sigmoid): pair.take_sigmoid, _place(one): pair.take_logarithm}
    yield case.attempt(Remedy("logsigmoid", (form, *_lines(others))), edits=edits)


def _form(call: OperationCall) -> tuple[str, OperationCall | None]:
    """Return the argument of `logsigmoid`, `"x"` or `"-x"`, and the sigmoid; empty for another operation."""
    if call.name not in _LOGARITHMS:
        return "", None
    form, sigmoid = "x", _maker(call)
    if sigmoid is not None and sigmoid.name == _LOGARITHMS[call.name]:
        form, sigmoid = "-x", _maker(sigmoid)
    return (form, sigmoid) if sigmoid is not None and sigmoid.name == "sigmoid" else ("", None)


# -- an operation, and the operations before and after it --------------------------------------------------------------


def _with(new: Tensor, argument: Tensor, func: _Func, args: _Args, kwargs: _Kwargs) -> Any:
    """Run an operation with one argument replaced."""
    args = tuple(new if value is argument else value for value in args)
    return func(*args, **{key: new if value is argument else value for key, value in kwargs.items()})


def _place(call: OperationCall) -> tuple[str, Place | None]:
    return call.key.name, call.key.place


def _lines(calls: Iterable[OperationCall]) -> list[str]:
    return [call.key.place.short for call in calls if call.key.place]


def _makers(call: OperationCall) -> Iterator[OperationCall]:
    """Iterate over the operations from whose results this one was computed, the nearest first."""
    seen, queue = {call.number}, [*call.makers]
    while queue:
        maker = queue.pop(0)
        if maker.number not in seen:
            seen.add(maker.number)
            yield maker
            queue += maker.makers


def _maker(call: OperationCall) -> OperationCall | None:
    """Return the operation that made the only argument, casts left out; `None` if there are several arguments."""
    while len(call.makers) == 1:
        call = call.makers[0]
        if call.name not in CASTS:
            return call
    return None


def _twin(maker: OperationCall, other: OperationCall) -> OperationCall | None:
    return next((one for one in islice(_makers(other), _MOST_MAKERS) if one.name == maker.name), None)


def _without_inner(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out modules that are inside of another one in the list."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def calls_like(call: OperationCall, bad: Sequence[OperationCall]) -> list[OperationCall]:
    """Return the operations of the same name that fail in the same way on other lines, one for each line."""
    found = {
        other.key.place: other
        for other in bad
        if (other.known_as, other.facts.kind) == (call.known_as, call.facts.kind) and not other.takes_nonfinite
    }
    return [other for place, other in found.items() if place is not None and place != call.key.place]


def modules_after(call: OperationCall, bad: Sequence[OperationCall], module: nn.Module) -> list[str]:
    """Name the modules whose own code computes with the result of `call`, in order."""
    names = {name for name, _ in module.named_modules()}
    after = [c.module for c in bad if c.number > call.number and call in c.chain]
    return [name for name in dict.fromkeys(after) if name and name in names]
