"""Operations done in another way, to see whether it helps: with an epsilon, in float32, without autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import final

from lightning_amp._containers import replace, to_fp32
from lightning_amp.numerics import HALF_DTYPES, all_finite
from lightning_amp.tracing import NORMS, argument_of


def in_fp32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the work of an operation on float32: the edit for `.float()` on what goes into it."""
    return func(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))


def without_autocast(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do it on float32, whatever autocast would cast it to."""
    device_type = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
    with torch.autocast(device_type, enabled=False):
        return in_fp32(func, args, kwargs)


def zero_infinity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a CTC loss with that option."""
    return func(*args[:6], **{**kwargs, "zero_infinity": True})


def finite_mask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do it on the lowest numbers of the format in the place of minus infinity."""

    def finite(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.masked_fill(torch.isneginf(value), torch.finfo(value.dtype).min / 4)
        return value

    return func(*replace(args, finite), **replace(kwargs, finite))


@final
class Clamp:
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


@final
class Epsilon:
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


@final
class Probe:
    """Does the work of an operation as it is, and notes whether all of its results were finite."""

    def __init__(self) -> None:
        self.is_finite = True

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.is_finite &= bool(all_finite([result]))
        return result


@final
class LogSigmoid:
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
