"""Write numbers and names in one way in all messages, so that they can be compared."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence

UNNAMED = re.compile(r"<[^<>]*?(\w+)(?: object)? at 0x\w+>|<class '(?:[^<>']*\.)?(\w+)'>")
"""The `repr` of an object or a class without a name of its own."""

_MOST_OF_A_VALUE = 120

_PLAIN = range(-3, 11)  # exponents of powers of two that are easy to recognise: 0.125 to 1024


def exact(value: float) -> str:
    """Write an exact number, such as a loss scale or a limit: `2**16`, `0.5`, `3,000`, `2**-14`."""
    exponent = _exponent(value)
    if exponent is not None:
        return f"{value:g}" if exponent in _PLAIN else f"2**{exponent}"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.10g}"


def power(value: float) -> str:
    """Write a power of two as one, even where it is easy to recognise: `2**10`."""
    exponent = _exponent(value)
    return exact(value) if exponent is None else f"2**{exponent}"


def alike(scales: Iterable[float]) -> Callable[[float], str]:
    """Return how to write these loss scales: all as `2**16`, or all plain if each is easy to recognise."""
    plain = all(scale == 0 or exact(scale) == f"{scale:g}" for scale in scales)
    return (lambda scale: f"{scale:.10g}") if plain else power


def rounded(value: float) -> str:
    """Write a measured number with three digits: `0.968`, `65,500`, `1.77e+08`."""
    if not math.isfinite(value) or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    short = float(f"{value:.3g}")
    return f"{short:,.0f}" if abs(short) >= 100 else f"{short:.3g}"


def literal(value: object) -> str:
    """Write a value as in code: `2.0**16`, `0.5`, `2000`; a long one in one line that is cut off.

    Names replace addresses and dotted paths.
    """
    exponent = _exponent(value) if isinstance(value, float) else None
    if exponent is not None and exponent not in _PLAIN:
        return f"2.0**{exponent}"
    text = " ".join(UNNAMED.sub(lambda found: found[1] or found[2], repr(value)).split())
    return text if len(text) <= _MOST_OF_A_VALUE else f"{text[: _MOST_OF_A_VALUE - 3]}..."


def called(one: object, *first: object, **values: object) -> str:
    """Return the code that makes an object, without arguments that have their default.

    Args:
        one: The object, whose attributes are the arguments.
        first: The first arguments, which are written without names.
        values: Arguments that are not attributes.

    """
    given = [*map(repr, first)]
    for argument in [*inspect.signature(type(one)).parameters.values()][len(first) :]:
        value = values.get(argument.name, getattr(one, argument.name, argument.default))
        written = literal(value) if isinstance(value, float) else repr(value)
        given += [] if value == argument.default else [f"{argument.name}={written}"]
    return f"{type(one).__name__}({', '.join(given)})"


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: `1 record`, `2,000 records`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[str], most: int = 3) -> str:
    """Write the first items and the number of the remaining items: `a, b, c and 2 more`."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def named(names: Sequence[str]) -> str:
    """Write the first names as code, and the number of the remaining names."""
    return listed([f"`{name}`" for name in names])


def percent(fraction: float) -> str:
    """Write a share with three digits: `12.5 %`, `99.9 %`.

    It is never rounded to `0 %` or `100 %`: these mean exactly nothing and exactly all.
    """
    if fraction in (0, 1):
        return f"{100 * fraction:.0f} %"
    return f"{min(max(100 * fraction, 0.001), 99.9):.3g} %"


def memory(num_bytes: float) -> str:
    """Write bytes in KiB, MiB or GiB: `12 KiB`, `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{rounded(num_bytes / size)} {unit}"
    return f"{rounded(num_bytes / 2**10)} KiB"


def _exponent(value: float) -> int | None:
    """Return the exponent of a power of two; `None` for any other number."""
    if not (value > 0 and math.isfinite(value)):
        return None
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else None
