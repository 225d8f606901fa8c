"""Refuse arguments in one wording: the rule, the value received, the next step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from lightning_amp._text import listed, literal


def require(fine: bool, name: str, rule: str, value: object, next_step: str = "", *, none: str = "") -> None:
    """Raise "`name` must be `rule`, got `value`. `next_step`" unless the argument is `fine`.

    If `None` is legal, `none` is appended to the rule and explains what `None` means: "or `None` for all".
    """
    if not fine:
        whole = f"{rule}, {none};" if none else f"{rule},"
        advice = f" {next_step}" if next_step else ""
        raise ValueError(f"`{name}` must be {whole} got {literal(value)}.{advice}")


def require_count(name: str, value: object, least: int = 1, *, none: str = "") -> None:
    """Refuse a value that is not an integer of `least` or more; `None` is legal if `none` explains what it means."""
    rule = f"an integer of {least} or more"
    require(is_count(value, least) or (bool(none) and value is None), name, rule, value, none=none)


def require_bool(name: str, value: object) -> None:
    """Refuse a value other than `True` and `False`."""
    require(isinstance(value, bool), name, "`True` or `False`", value)


def require_choice(name: str, value: object, choices: Sequence[str], next_step: str = "") -> None:
    """Refuse a value that is not among the choices."""
    require(value in choices, name, " or ".join(f'"{choice}"' for choice in choices), value, next_step)


def checked_rules(name: str, rules: object, legal: str, example: str, base: type | None = None) -> tuple[Any, ...]:
    """Return a sequence of globs, and of classes derived from `base` if given, as a tuple; refuse anything else."""
    one = rules.__name__ if isinstance(rules, type) else repr(rules if isinstance(rules, str) else example)
    fine = isinstance(rules, Iterable) and not isinstance(rules, (str, type))
    require(fine, name, "a sequence of rules", rules, f"Write `{name}=[{one}]`.")
    checked = tuple(cast(Iterable[Any], rules))
    for rule in checked:
        if rule == "" or not (isinstance(rule, str) or (isinstance(rule, type) and issubclass(rule, base or ()))):
            raise ValueError(f"`{name}` must hold {legal}; got {literal(rule)}.")
    return checked


def no_match(
    argument: str, rule: str, kind: str, names: Iterable[str], write: Callable[[str], str] = repr
) -> ValueError:
    """Return the error for a rule that matches none of these `names` of modules or buffers, with the closest ones."""
    known, last = list(dict.fromkeys(names)), rule.strip("*").rpartition(".")[2]
    close = [name for name in known if last and last in name] or difflib.get_close_matches(rule, known, cutoff=0.5)
    where = f"{'Close to it' if close else 'There'} are: {listed([*map(write, close or known)] or ['none'], most=5)}"
    return ValueError(f"`{argument}` has the rule {write(rule)}, which matches no {kind}. {where}.")


def is_number(value: Any, *, finite: bool = True) -> bool:
    """Return whether a value is a number, and finite unless `finite` is false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (not finite or math.isfinite(value))


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer that is at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
