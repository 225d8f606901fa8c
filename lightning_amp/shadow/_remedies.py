"""What may help a step that is not finite, as trials: each runs the step again, and is told whether it helped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._containers import replace, to_fp32
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.reports import Remedy
from lightning_amp.tracing import EXPONENTIALS, NORMS, Edit, Operation, OperationCall, Place, argument_of

_EPSILONS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2)
_EXPONENTS = (80.0, 20.0, 10.0, 5.0)
_LOWER = (2.0**-2, 2.0**-6, 2.0**-12)


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """One way to run the step again.

    Attributes:
        remedy: What is tried; `worked` is still open.
        precision: To run it in; empty: as it was.
        rules: Modules that compute in fp32.
        edits: Operations, by name and line, that are done in another way.
        scale: The loss scale; `None`: one at which it overflows least.

    """

    remedy: Remedy
    precision: str = ""
    rules: tuple[str, ...] = ()
    edits: dict[tuple[str, Place | None], Edit] = field(default_factory=dict)
    scale: float | None = None


Trials = Generator[Trial, bool, None]
"""Yields trials, and is sent whether each worked."""


def trials_in_half(
    precision: str,
    choices: Sequence[str],
    operation: Operation | None,
    call: OperationCall | None,
    takers: Sequence[str],
    *,
    epsilons: bool = True,
) -> Trials:
    """Try what has more range, or more digits, than the step had; fp32 is known to have enough.

    Args:
        precision: Of the step, by our name.
        choices: Precisions that the device runs.
        operation: That is to blame, if it is known.
        call: The same.
        takers: Modules that its result went through, in order.
        epsilons: Whether to try an epsilon where an argument is 0: it hides the digits that were lost.

    """
    if precision == "fp16" and "bf16" in choices:
        yield Trial(Remedy("bf16"), precision="bf16")
    if precision == "fp32":
        return
    name = "" if operation is None or operation.module is None else operation.module
    for rules in _rules(name, takers):
        if (yield Trial(Remedy("fp32_modules", rules), rules=rules)):
            break
    if epsilons and call is not None and operation is not None and operation.kind == "zero":
        for epsilon in _EPSILONS:
            edits = {(call.key.name, call.key.place): _Epsilon(call.known_as, epsilon, operation.kind)}
            if (yield Trial(Remedy("epsilon", (epsilon,)), edits=edits)):
                break
    if call is not None and call.name in EXPONENTIALS:
        for largest in _EXPONENTS:
            if (yield Trial(Remedy("clamp", (largest,)), edits={(call.key.name, call.key.place): _Clamp(largest)})):
                break
    if call is not None and operation is not None and operation.is_users and operation.name not in ("to", "to_"):
        place = (call.key.name, call.key.place)
        if not (yield Trial(Remedy("operation in fp32"), edits={place: in_fp32})):
            yield Trial(Remedy("operation without autocast"), edits={place: _without_autocast})


def _rules(name: str, takers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return which modules to try together, the fewest first."""
    others = list(dict.fromkeys(taker for taker in takers if taker and taker != name))
    found: list[tuple[str, ...]] = []
    if name:
        found.append((name,))
        found += [(name, *others[:count]) for count in (1, 2) if len(others) >= count]
        parent = name.rpartition(".")[0]
        found += [(parent,)] if parent else []
    return list(dict.fromkeys(map(_without_inner, found)))


def _without_inner(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out modules inside of others."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def trials_of_scale(scale: float, fitting: float) -> Trials:
    """Try lower scales, until one works: the one at which the true gradients fit, and less.

    Args:
        scale: At which the step failed.
        fitting: At which the largest true gradient fits.

    """
    start = min(fitting, scale / 2)
    for lower in (start, *(start * factor for factor in _LOWER)):
        kind = "scale" if lower >= 1 else "divisor"
        if (yield Trial(Remedy(kind, (lower if kind == "scale" else 1 / lower,)), scale=lower)):
            return


def trials_in_any_precision(
    operation: Operation | None, call: OperationCall | None, alike: Sequence[OperationCall] = ()
) -> Trials:
    """Try what changes the operation itself, and those that fail like it on other lines: fp32 fails as well."""
    if operation is None or call is None:
        return
    place = (call.key.name, call.key.place)
    if operation.kind == "masked":
        yield Trial(Remedy("finite mask"), edits={place: _finite_mask})
    if operation.name == "ctc_loss":
        yield Trial(Remedy("zero_infinity"), edits={place: _zero_infinity})
    if operation.name in EXPONENTIALS:
        for largest in _EXPONENTS:
            if (yield Trial(Remedy("clamp", (largest,)), edits={place: _Clamp(largest)})):
                return
    if operation.kind in ("zero", "negative") or (operation.in_backward and operation.kind_in_fp32 == "zero"):
        for epsilon in _EPSILONS:
            edit = _Epsilon(call.known_as, epsilon, operation.kind)
            edits = dict.fromkeys((place, *((other.key.name, other.key.place) for other in alike)), edit)
            elsewhere = [other.key.place.short for other in alike if other.key.place]
            if (yield Trial(Remedy("epsilon", (epsilon, *elsewhere)), edits=edits)):
                return


def in_fp32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the work of an operation on float32: the edit for `.float()` on what goes into it."""
    return func(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))


def _without_autocast(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device_type = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
    with torch.autocast(device_type, enabled=False):
        return in_fp32(func, args, kwargs)


def _zero_infinity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args[:6], **{**kwargs, "zero_infinity": True})


@final
class _Clamp:
    """Keeps what goes in below a number."""

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument = argument_of("exp", args, kwargs)
        below = argument.clamp(max=self._largest)
        return func(
            *(below if value is argument else value for value in args),
            **{key: below if value is argument else value for key, value in kwargs.items()},
        )


def _finite_mask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def finite(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.masked_fill(torch.isneginf(value), torch.finfo(value.dtype).min / 4)
        return value

    return func(*replace(args, finite), **replace(kwargs, finite))


@final
class _Epsilon:
    """Keeps what must not be 0 an epsilon away from it, as the advice says: adds it, or clamps what is below 0."""

    def __init__(self, name: str, epsilon: float, kind: str) -> None:
        self._name, self._epsilon, self._kind = name.removesuffix("_"), epsilon, kind

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument = argument_of(self._name, args, kwargs)
        if not isinstance(argument, Tensor):
            return func(*args, **kwargs)
        away = self._away(argument)
        if self._name in NORMS:
            away = torch.where(argument.abs() < self._epsilon, self._epsilon, argument)  # smooth at 0
        args = tuple(away if value is argument else value for value in args)
        return func(*args, **{key: away if value is argument else value for key, value in kwargs.items()})

    def _away(self, value: Tensor) -> Tensor:
        if self._name == "div":
            return torch.where(value < 0, value - self._epsilon, value + self._epsilon)
        if self._name in ("acos", "asin", "atanh", "logit"):
            return value.clamp(self._epsilon - (self._name != "logit"), 1 - self._epsilon)
        if self._name == "log1p":
            return value.clamp(min=self._epsilon - 1)
        return value.clamp(min=self._epsilon) if self._kind == "negative" else value + self._epsilon


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
