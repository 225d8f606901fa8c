"""Search for a small set of modules that passes a test, and the results of `find_fp32_modules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import Self, final

from lightning_amp._text import percent, rounded
from lightning_amp.casting import Rule

Tree = Mapping[str, Sequence[str]]
"""The names of the nearest modules inside each module; the empty name has the modules at the top."""

_MOST = 150


@final
class Found(NamedTuple):
    """The result of a search.

    Attributes:
        names: Modules that pass the test together; `None` if not even all modules pass.
        num_tried: Number of evaluated sets.
        complete: Whether no module can be left out. False if the budget of evaluations ran out before that was known.

    """

    names: tuple[str, ...] | None
    num_tried: int
    complete: bool


def search(
    tree: Tree, passes: Callable[[tuple[str, ...]], bool], suspicion: Mapping[str, float], most: int = _MOST
) -> Found:
    """Find few and small modules that pass together.

    Modules at the top are added until they pass, the most suspicious first, and twice as many each time. Then modules
    are left out, in halves, the less suspicious ones first (delta debugging, Zeller and Hildebrandt 2002). Each module
    that is left is replaced by modules inside it in the same way, if these are enough, and so on down the tree.

    Args:
        tree: The modules.
        passes: Returns whether it is enough to have these modules, and all modules inside them, in fp32. It is called
            once per set.
        suspicion: Ratings by name; a higher one is more suspicious. A module without a rating is not suspicious.
        most: Largest number of evaluations.

    """
    known: dict[tuple[str, ...], bool] = {}
    is_over = False

    def is_enough(names: Iterable[str]) -> bool:
        nonlocal is_over
        single = tuple(sorted(names))
        if single not in known and len(known) >= most:
            is_over = True
            return False
        if single not in known:
            known[single] = passes(single)
        return known[single]

    def rating(name: str) -> float:
        return suspicion.get(name, -math.inf)

    def without(group: Sequence[str], kept: list[str]) -> list[str]:
        """Leave out as many modules of a group as possible."""
        rest = [name for name in kept if name not in group]
        if is_enough(rest):
            return rest
        if len(group) == 1:
            return kept
        half = (len(group) + 1) // 2
        return without(group[half:], without(group[:half], kept))

    def fewest(group: Sequence[str], rest: list[str]) -> list[str] | None:
        """Return few modules of a group that pass together with the rest; `None` if the whole group does not."""
        ranked, count = sorted(group, key=rating, reverse=True), 0
        if not is_enough([*rest, *ranked]):
            return None
        while not is_enough([*rest, *ranked[:count]]):
            count = min(max(1, 2 * count), len(ranked))
        kept = without(ranked[:count][::-1], [*rest, *ranked[:count]]) if count else rest
        return [name for name in ranked if name in kept]

    kept = fewest(tree[""], [])
    if kept is None:
        return Found(None, len(known), complete=True)
    waiting = list(kept)
    while waiting:
        name = waiting.pop(0)
        others = [other for other in kept if other != name]
        parts = fewest(tree[name], others) if tree[name] else None
        if parts is not None:
            kept = [*others, *parts]
            waiting += parts
    for name in sorted(kept, key=rating):  # it was needed only because of one that was left out later
        kept = without([name], kept)
    for name in sorted(tree, key=lambda name: -name.count(".")):
        children = tree[name]
        if name and len(children) > 1 and set(children) <= set(kept):  # all of a module: name the module
            around = [*(other for other in kept if other not in children), name]
            kept = around if is_enough(around) else kept
    return Found(tuple(kept), len(known), complete=not is_over)


# -- results ---------------------------------------------------------------------------------------------------------


@final
class Fp32Rules(tuple[Rule, ...]):
    """Rules for `fp32_modules=`: a tuple with attributes about their cost and effect.

    Attributes:
        cost: Time of forward and backward with the rules, over the time without them: 1.08 is 8 % slower. 1.0 if there
            are no rules; NaN if a step does not run without them.
        message: The result in one or two sentences.
        tried: Number of sets of modules that were evaluated.
        gradient_errors: Relative error of the gradient without and with the rules, on the batches of the search.
            Infinite if a value was not finite.
        metric_errors: The same for each validation metric.

    """

    cost: float
    message: str
    tried: int
    gradient_errors: tuple[float, float]
    metric_errors: Mapping[str, tuple[float, float]]

    def __new__(cls, rules: Iterable[Rule], **attributes: Any) -> Self:
        """Make the tuple and set its attributes."""
        made = super().__new__(cls, rules)
        vars(made).update(attributes)
        return made


class NothingHelps(ValueError):  # noqa: N818 - a result, not a fault
    """No set of modules in fp32 is enough, or fp32 itself is not finite."""


@final
@dataclass(frozen=True)
class Distance:
    """Relative errors against fp32; infinite if a value is not finite or the step failed.

    Attributes:
        gradient: Norm of the difference over the norm in fp32, over all parameters, on the worst batch.
        metrics: The error of each validation metric.
        why: The reason in words if the error of the gradient is infinite.

    """

    gradient: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def within(self, tolerance: float) -> bool:
        """Return whether no error is larger."""
        return all(error <= tolerance for error in (self.gradient, *self.metrics.values()))

    def __str__(self) -> str:
        """Write the errors: `gradients differ by 12 % and val_loss differs by 3.4 %`."""
        finite = math.isfinite(self.gradient)
        text = f"gradients differ by {as_percent(self.gradient)}" if finite else self.why
        if not self.metrics:
            return text
        name, error = max(self.metrics.items(), key=lambda item: item[1])
        differs = f"differs by {as_percent(error)}" if math.isfinite(error) else "is not finite"
        return f"{text} and `{name}` {differs}"


def as_percent(error: float) -> str:
    """Write a relative error: `0.12 %`, `340 %`."""
    return percent(error) if error < 1 else f"{rounded(100 * error)} %"
