"""What may help a step that is not finite, and in which order it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from torch import nn
from typing_extensions import final

from lightning_amp.causes._attempts import Attempt, first_that_works
from lightning_amp.causes.overflow._edits import (
    Clamp,
    Epsilon,
    LogSigmoid,
    Probe,
    finite_mask,
    in_fp32,
    without_autocast,
    zero_infinity,
)
from lightning_amp.findings import Remedy
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.shadow import Lockstep
from lightning_amp.tracing import CASTS, EXPONENTIALS, Diagnosis, Edit, Operation, OperationCall, Place

_EPSILONS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2)
_LARGEST_EXPONENTS = (80.0, 20.0, 10.0, 5.0)
_LOWER = (2.0**-2, 2.0**-6, 2.0**-12)
_MOST_MAKERS = 4
_LOGARITHMS = {"log": "sub", "log1p": "neg"}
"""Logarithms, and what is done to `p` before them in `log(1 - p)`."""

_Attempts = Iterable[Attempt[Remedy, bool]]
_Edits = Mapping[tuple[str, Place | None], Edit]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A step that is not finite, and how it was.

    Attributes:
        found: What is to blame.
        call: The operation of the replay that it names, if it is known.
        alike: Others that fail in the same way, on other lines.
        takers: Modules that its result went through, in order.
        precision: Of the step, by our name.
        choices: Precisions that the device runs.
        scale: At which it failed.
        fitting: At which its largest true gradient fits.
        is_finite: Runs the step with what may help, as of :meth:`Rerun.is_finite`.

    """

    found: Diagnosis
    call: OperationCall | None
    alike: Sequence[OperationCall]
    takers: Sequence[str]
    precision: str
    choices: Sequence[str]
    scale: float
    fitting: float
    is_finite: Callable[..., bool]

    @property
    def operation(self) -> Operation | None:
        """Return the operation that is to blame, if it is known."""
        return self.found.operation

    def attempt(self, remedy: Remedy, **how: object) -> Attempt[Remedy, bool]:
        """Return the step with this remedy, not yet run."""
        return Attempt(remedy, partial(self.is_finite, **how))


def try_remedies(ranks: Lockstep, case: Case) -> list[Remedy]:
    """Try what may help: of each remedy one strength after the other, until one works."""
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
        if lost_by in ([], ["add"]):  # an epsilon that was added in vain, and so rounded away, may be too small only
            helps(_epsilon)
        helps(_clamp, _operation_in_fp32)
    return tried


# -- the remedies: what they change ------------------------------------------------------------------------------------


def _bf16(case: Case) -> _Attempts:
    if case.precision == "fp16" and "bf16" in case.choices:
        yield case.attempt(Remedy("bf16"), precision="bf16")


def _fp32_modules(case: Case) -> _Attempts:
    """Keep modules in fp32: the one that is to blame, then those that take its result, then what is around it."""
    name = "" if case.operation is None else case.operation.module or ""
    if not name:
        return
    others = list(dict.fromkeys(taker for taker in case.takers if taker and taker != name))
    together = [(name,), *((name, *others[:count]) for count in (1, 2) if len(others) >= count)]
    if parent := name.rpartition(".")[0]:
        together.append((parent,))
    for names in dict.fromkeys(map(_without_inner, together)):
        yield case.attempt(Remedy("fp32_modules", names), rules=names)


def _lower_scale(case: Case) -> _Attempts:
    """Lower the scale: to where the true gradients fit, and further."""
    start = min(case.fitting, case.scale / 2)
    for lower in (start, *(start * factor for factor in _LOWER)):
        remedy = Remedy("scale", (lower,)) if lower >= 1 else Remedy("divisor", (1 / lower,))
        yield case.attempt(remedy, scale=lower)


def _finite_mask(case: Case) -> _Attempts:
    if case.call is not None and case.operation is not None and case.operation.kind == "masked":
        yield case.attempt(Remedy("finite mask"), edits={_place(case.call): finite_mask})


def _zero_infinity(case: Case) -> _Attempts:
    if case.call is not None and case.call.name == "ctc_loss":
        yield case.attempt(Remedy("zero_infinity"), edits={_place(case.call): zero_infinity})


def _clamp(case: Case) -> _Attempts:
    if case.call is not None and case.call.name in EXPONENTIALS:
        for largest in _LARGEST_EXPONENTS:
            yield case.attempt(Remedy("clamp", (largest,)), edits={_place(case.call): Clamp(largest)})


def _epsilon(case: Case, alike: Sequence[OperationCall] = (), kinds: Sequence[str] = ("zero",)) -> _Attempts:
    call, operation = case.call, case.operation
    if call is None or operation is None or operation.kind not in kinds:
        return
    for epsilon in _EPSILONS:
        edit = Epsilon(call.known_as, epsilon, operation.kind)
        edits = dict.fromkeys(map(_place, (call, *alike)), edit)
        yield case.attempt(Remedy("epsilon", (epsilon, *_lines(alike))), edits=edits)


def _epsilons_in_any_precision(case: Case) -> _Attempts:
    """Add an epsilon on all lines that fail alike, and where an argument is below 0; fp32 fails as well."""
    kinds, operation = ["zero", "negative"], case.operation
    if operation is not None and operation.in_backward and operation.kind_in_fp32 == "zero":
        kinds.append(operation.kind)
    return _epsilon(case, case.alike, kinds)


def _operation_in_fp32(case: Case) -> _Attempts:
    call, operation = case.call, case.operation
    if call is not None and operation is not None and operation.is_users and operation.name not in ("to", "to_"):
        yield case.attempt(Remedy("operation in fp32"), edits={_place(call): in_fp32})
        yield case.attempt(Remedy("operation without autocast"), edits={_place(call): without_autocast})


def _logsigmoid(case: Case) -> _Attempts:
    """Take `logsigmoid` in the place of the logarithm of a sigmoid, or of one minus it."""
    form = "" if case.call is None else _form(case.call)[0]
    if case.call is None or not form:
        return
    pair, edits = LogSigmoid(case.call.name), dict[tuple[str, Place | None], Edit]()
    others = [other for other in case.alike if _form(other)[0]]
    for one in (case.call, *others):
        sigmoid = _form(one)[1]
        assert sigmoid is not None
        edits |= {_place(sigmoid): pair.take_sigmoid, _place(one): pair.take_logarithm}
    yield case.attempt(Remedy("logsigmoid", (form, *_lines(others))), edits=edits)


def _try_sources(ranks: Lockstep, case: Case) -> list[Remedy]:
    """Try float32 in what made an argument that half precision rounds to 0, the latest operation first."""
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
        named, probe = (maker.name, "" if maker.key.place is None else str(maker.key.place)), Probe()
        others = [twin for other in case.alike if (twin := _twin(maker, other)) is not None]
        elsewhere = dict.fromkeys(_lines([one for one in others if one.key.place != maker.key.place]))
        edits: _Edits = {_place(call): probe, **dict.fromkeys(map(_place, (maker, *others)), in_fp32)}
        remedy = Remedy("source in fp32", (*named, *(lost or named), *elsewhere))
        now = first_that_works(ranks, [case.attempt(remedy, edits=edits)])
        if lost is None and probe.is_finite and not operation.in_backward:  # where its result is finite all the same
            lost = named
        if maker.module and maker.module not in modules:
            modules.add(maker.module)  # a linear layer casts what it gets: it needs its own rule
            rules = (maker.module,)
            now += first_that_works(ranks, [case.attempt(Remedy("fp32_modules", rules), rules=rules)])
        tried += [one._replace(worked=worked) for one, worked in now]
        if any(worked for _, worked in now):
            break
    return tried


# -- operations around the one that is to blame ------------------------------------------------------------------------


def _place(call: OperationCall) -> tuple[str, Place | None]:
    return call.key.name, call.key.place


def _lines(calls: Iterable[OperationCall]) -> list[str]:
    return [call.key.place.short for call in calls if call.key.place]


def _form(call: OperationCall) -> tuple[str, OperationCall | None]:
    """Return what `logsigmoid` would take, and the sigmoid: `"x"` or `"-x"`; empty if it is no logarithm of one."""
    if call.name not in _LOGARITHMS:
        return "", None
    form, sigmoid = "x", _maker(call)
    if sigmoid is not None and sigmoid.name == _LOGARITHMS[call.name]:
        form, sigmoid = "-x", _maker(sigmoid)
    return (form, sigmoid) if sigmoid is not None and sigmoid.name == "sigmoid" else ("", None)


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


def _without_inner(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out modules inside of others."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def calls_like(call: OperationCall, bad: Sequence[OperationCall]) -> list[OperationCall]:
    """Return operations of the same name that fail in the same way on other lines, one of each line."""
    found = {
        other.key.place: other
        for other in bad
        if (other.known_as, other.facts.kind) == (call.known_as, call.facts.kind) and not other.takes_nonfinite
    }
    return [other for place, other in found.items() if place is not None and place != call.key.place]


def modules_after(call: OperationCall, bad: Sequence[OperationCall], module: nn.Module) -> list[str]:
    """Name the modules whose own code ran operations on what `call` made, in order."""
    names = {name for name, _ in module.named_modules()}
    after = [c.module for c in bad if c.number > call.number and call in c.chain]
    return [name for name in dict.fromkeys(after) if name and name in names]
