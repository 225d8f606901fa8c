"""Suggest a learning rate for another batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import final

from lightning_amp._text import listed, rounded

_LINEAR = ("SGD", "LARS")
_SQUARE_ROOT = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "LAMB", "Lamb")


@final
class UsedRate(NamedTuple):
    """The learning rate of one parameter group, as the user set it, and the class of its optimizer."""

    optimizer: str
    lr: float


_FAR = 32
"""Largest ratio of batch sizes for which the rule was tried: Goyal et al. went from 256 to 8,192."""


def suggested_rate(used: Sequence[UsedRate], from_size: int, to_size: int) -> tuple[float | None, str]:
    """Scale a learning rate to another batch size: linearly for SGD, by the square root for Adam and its variants.

    Sources: `Goyal et al. 2017 <https://arxiv.org/abs/1706.02677>`_ for SGD, `Malladi et al. 2022
    <https://arxiv.org/abs/2205.10287>`_ for adaptive ones. Both are rules of thumb, and fail for batches so large that
    their gradients have little noise.

    Returns:
        The rate, or `None` if there is no single one, and a sentence about its origin or absence.

    """
    if not used:
        return None, "No learning rate is suggested: the module has no optimizer with an `lr`."
    names = list(dict.fromkeys(rate.optimizer for rate in used))
    rules = {_rule(name) for name in names}
    (rule,) = rules if len(rules) == 1 else (None,)
    if rule is None:
        known = "SGD (linear) and for Adam and its kin (square root)"
        return None, f"No learning rate is suggested: the rules are for {known}, not for {listed(names)}."
    ratio = to_size / from_size
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    rates = list(dict.fromkeys(rate.lr for rate in used))
    optimizer = listed(names)
    if len(rates) > 1:
        each = listed([rounded(rate) for rate in rates])
        text = f"There are several learning rates ({each}): multiply each by {rounded(factor)}"
        return None, f"{text} ({rule} rule for {optimizer}, from batch size {from_size:,}), only as a start to try."
    if to_size == from_size:
        return rates[0], f"The learning rate stays {rates[0]:g}: it is the module's own batch size."
    suggestion = float(f"{rates[0] * factor:.3g}")
    text = f"Learning rate to try: {suggestion:g}, scaled from {rates[0]:g} at batch size {from_size:,}"
    far = f", and {rounded(ratio)} times the batch is farther than the rule was tried for" if ratio > _FAR else ""
    return suggestion, f"{text} ({rule} rule for {optimizer}); a starting point only{far}."


def _rule(name: str) -> str | None:
    if any(part in name for part in _SQUARE_ROOT):
        return "square root"
    return "linear" if any(part in name for part in _LINEAR) else None
