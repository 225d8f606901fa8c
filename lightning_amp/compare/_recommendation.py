"""Which arm to use, why, and what would change that: one sentence or two."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typing_extensions import final

from lightning_amp._plain_data import code
from lightning_amp._text import rounded
from lightning_amp.compare._arm import Arm, ArmMetric
from lightning_amp.compare._statistics import LEAST_PAIRS
from lightning_amp.compare._verdict import in_words

_SMALLER = 0.95
"""From here on a peak of memory is called smaller: allocators round, and batches differ."""


@final
class Recommendation(NamedTuple):
    """The label of an arm, or `None`, and the sentences that say why; the first one says what to do."""

    label: str | None
    sentences: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return all of it."""
        return " ".join(self.sentences)


def recommend(arms: Mapping[str, Arm]) -> Recommendation:
    """Recommend the fastest arm that was shown to be not worse in all metrics that have a margin.

    Faster is what the interval of its speed shows; memory counts only where the speed is shown to be the same.
    """
    reference = next(arm for arm in arms.values() if arm.is_reference)
    others = [arm for arm in arms.values() if not (arm.is_reference or arm.is_control)]
    obstacle, *more = _obstacle(reference, others)
    if obstacle:
        return Recommendation(None, (f"No recommendation: {obstacle}", *more))
    fine = [arm for arm in others if _is_fine(arm)]
    gaining = [arm for arm in fine if _gains(arm, reference)]
    undecided = [arm for arm in others if arm.finished and arm not in fine and not _worse_in(arm)]
    of_unknown_speed = [arm for arm in fine if _speedup(arm) is None]
    if gaining:
        arm = max(gaining, key=lambda arm: (_speedup(arm) or 0.0, -_memory_ratio(arm, reference)))
        maybe = [other for other in undecided if not other.errors and not _not_finite_in(other)]
        rivals = [other for other in (*maybe, *of_unknown_speed) if _may_be_faster(other, arm)]
        reasons = _listed([*_gains(arm, reference), f"is not worse in {_names(_judged(arm))} within {_margin(arm)}"])
        return Recommendation(arm.label, (f"Use {code(arm.label)}: it {reasons}.", _what_would_change(arm, rivals)))
    if undecided or of_unknown_speed:
        open_ = [_why_undecided(arm) for arm in undecided]
        open_ += [_why_of_unknown_speed(arm, reference) for arm in of_unknown_speed]
        how = _how_to_decide(undecided) if undecided else "More seeds narrow the interval of a speed."
        return Recommendation(None, (f"No recommendation yet: {'; '.join(open_)}.", how, *_speeds(undecided)))
    reasons = "; ".join(_why_not(arm, reference) for arm in others)
    return Recommendation(reference.label, (f"Stay with {code(reference.label)}: {reasons}.", _remedy(fine, others)))


def _speedup(arm: Arm) -> float | None:
    """Return how many times as fast as the reference an arm is; `None` if that is undecided or was not measured."""
    return None if arm.speed is None else arm.speed.decided_ratio


def _may_be_faster(arm: Arm, than: Arm) -> bool:
    """Return whether the intervals leave it open that an arm is the faster one of two."""
    if arm.speed is None or than.speed is None:
        return False
    return (arm.speed.high or arm.speed.ratio) > (_speedup(than) or 1.0)


def _obstacle(reference: Arm, others: Sequence[Arm]) -> list[str]:
    """Say why nothing can be recommended, whatever the other arms did; an empty sentence if that is not so."""
    name = code(reference.label)
    if not others:
        return [f"{name} is the only arm.", "Add a precision to compare it with."]
    if not reference.finished:
        return [f"the reference, {name}, {_failure(reference)}."]
    if not reference.metrics:
        return [f"the reference, {name}, logged no metric in validation, by which precisions could be compared."]
    if not any(_judged(arm) for arm in (reference, *others)):
        few = ", and at least three seeds" if len(reference.runs) < LEAST_PAIRS else ""
        pass_them = f"Pass `margins`, for example `margins={{{_example(reference)}}}`{few}."
        return ["no margin says what a precision may cost.", pass_them, *_speeds(others)]
    lost = _not_finite_in(reference)
    return [f"{_names(lost)} of the reference, {name}, is not finite." if lost else ""]


def _example(reference: Arm) -> str:
    known = [name for name, metric in reference.metrics.items() if metric.direction is not None]
    return f"{known[0]!r}: 0.01" if known else f"{next(iter(reference.metrics))!r}: ('min', 0.01)"


# -- what an arm is ----------------------------------------------------------------------------------------------------


def _judged(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in arm.metrics.values() if metric.margin is not None]


def _is_fine(arm: Arm) -> bool:
    judged = _judged(arm)
    return bool(judged) and not arm.errors and all(metric.verdict.claim == "not worse" for metric in judged)


def _worse_in(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in _judged(arm) if metric.verdict.claim == "worse"]


def _undecided_in(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in _judged(arm) if metric.verdict.claim != "not worse"]


def _not_finite_in(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in _judged(arm) if not all(map(math.isfinite, metric.finals.values()))]


def _memory_ratio(arm: Arm, reference: Arm) -> float:
    own, theirs = arm.peak_memory_bytes, reference.peak_memory_bytes
    return own / theirs if own and theirs else 1.0


def _gains(arm: Arm, reference: Arm) -> list[str]:
    """Say what an arm gains, and what that costs in memory; nothing if it is slower, or neither faster nor smaller."""
    ratio, theirs = _memory_ratio(arm, reference), code(reference.label)
    if arm.speed is None or _speedup(arm) is None or arm.speed.claim == "slower":
        return []
    if arm.speed.claim == "faster":
        more = [] if ratio < 1 / _SMALLER else [f"needs {100 * (ratio - 1):.0f} % more memory"]
        less = [] if ratio > _SMALLER else [f"needs {100 * (1 - ratio):.0f} % less memory"]
        return [f"is {arm.speed.in_words(theirs)}", *more, *less]
    return [f"needs {100 * (1 - ratio):.0f} % less memory than {theirs}", f"is {arm.speed}"] if ratio < _SMALLER else []


# -- sentences ---------------------------------------------------------------------------------------------------------


def _what_would_change(arm: Arm, rivals: Sequence[Arm]) -> str:
    """Name the margins at which the verdict would fall, and arms that may be faster and are undecided."""
    limits = [(metric, metric.highest_cost or 0.0) for metric in _judged(arm)]
    bounds = [f"{rounded(bound)} in {code(metric.name)}" for metric, bound in limits if bound > 0]
    parts: list[str] = []
    if bounds:
        parts.append(
            f"{'A margin' if len(bounds) == 1 else 'Margins'} below about {_listed(bounds, 'or')} would change that"
        )
    if rivals:
        more = "more seeds could, too" if parts else "More seeds could change that"
        verb = "is" if len(rivals) == 1 else "are"
        parts.append(f"{more}: {_listed([code(other.label) for other in rivals])} may be faster, but {verb} undecided")
    return f"{'; '.join(parts)}." if parts else "Other data or longer training could change that."


def _why_undecided(arm: Arm) -> str:
    name = code(arm.label)
    if arm.errors:
        seeds = list(arm.errors)
        return f"{name} failed with {'seed' if len(seeds) == 1 else 'seeds'} {_listed([str(seed) for seed in seeds])}"
    if _not_finite_in(arm):
        return f"{name} is not finite in {_names(_not_finite_in(arm))}"
    return f"{name} is undecided in {_names(_undecided_in(arm))}"


def _why_of_unknown_speed(arm: Arm, reference: Arm) -> str:
    """Say that an arm costs nothing, and what is not known about its speed; less memory does not outweigh that."""
    ratio = _memory_ratio(arm, reference)
    smaller = f" and needs {100 * (1 - ratio):.0f} % less memory" if ratio < _SMALLER else ""
    if arm.speed is None:
        speed = "its speed was not measured"
    elif arm.speed.claim == "one run":
        speed = f"its speed was measured with one seed only ({arm.speed})"
    else:
        speed = f"its speed is undecided{f' ({arm.speed.interval})' if arm.speed.interval else ''}"
    return f"{code(arm.label)} is not worse{smaller}, but {speed}"


def _how_to_decide(undecided: Sequence[Arm]) -> str:
    """Say what would decide about arms that are not decided: as many seeds as their verdicts say, or a repair."""
    whole = [arm for arm in undecided if not arm.errors]
    metrics = [metric for arm in whole if not _not_finite_in(arm) for metric in _undecided_in(arm)]
    if not metrics:
        return "`OverflowLocator` shows where." if whole else "What failed has to be run again."
    if any(metric.difference is None or len(metric.difference.values) < LEAST_PAIRS for metric in metrics):
        return "It takes at least three seeds to decide."
    needed = [metric.verdict.seeds_needed for metric in metrics if metric.verdict.seeds_needed is not None]
    return f"It takes {in_words(max(needed)) if needed else 'more'} seeds to decide, or larger margins."


def _speeds(arms: Sequence[Arm]) -> list[str]:
    known = [f"{code(arm.label)}: {arm.speed}" for arm in arms if arm.speed is not None]
    return [f"Measured beside it, {'; '.join(known)}."] if known else []


def _why_not(arm: Arm, reference: Arm) -> str:
    name = code(arm.label)
    if not arm.finished:
        return f"{name} {_failure(arm)}"
    if _worse_in(arm):
        return f"{name} is worse in {_names(_worse_in(arm))}"
    ratio = _memory_ratio(arm, reference)
    if arm.speed is None or arm.speed.claim != "slower":
        return f"{name} is not worse, but neither faster nor smaller"
    smaller = f", though it needs {100 * (1 - ratio):.0f} % less memory" if ratio < _SMALLER else ""
    return f"{name} is not worse, but {arm.speed}{smaller}"


def _remedy(fine: Sequence[Arm], others: Sequence[Arm]) -> str:
    if fine:
        return "A larger model, or a device that computes in half precision, could change that."
    if any(arm.finished for arm in others):
        return "Larger margins could change that, or an arm with `fp32_modules`."
    return "What failed has to be run again to be judged."


def _failure(arm: Arm) -> str:
    text = next(iter(arm.errors.values()), None)
    if text is None:
        return "did not run"
    return f"failed ({code(textwrap.shorten(text, 120, placeholder=' ...'))})"


def _margin(arm: Arm) -> str:
    return "the margin" if len(_judged(arm)) == 1 else "the margins"


def _names(metrics: Sequence[ArmMetric]) -> str:
    return _listed([code(metric.name) for metric in metrics])


def _listed(items: Sequence[str], word: str = "and", most: int = 3) -> str:
    """Write `a`, `a and b`, `a, b and c`, `a, b, c and 2 more`."""
    shown = [*items[:most], f"{len(items) - most} more"] if len(items) > most else list(items)
    return f" {word} ".join([part for part in (", ".join(shown[:-1]), *shown[-1:]) if part])
