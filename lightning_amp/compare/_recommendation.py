"""Recommend an arm in one or two sentences, with the reason and the conditions that would change it."""

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
"""A peak of memory below this share of the reference's is called smaller: allocators round, and batches differ."""


@final
class Recommendation(NamedTuple):
    """The label of an arm, or `None`, and the sentences that give the reason.

    The first sentence is the recommendation.
    """

    label: str | None
    sentences: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return all sentences."""
        return " ".join(self.sentences)


def recommend(arms: Mapping[str, Arm]) -> Recommendation:
    """Recommend the fastest arm that was shown to be not worse in all metrics with a margin.

    An arm is faster if the interval of its speed shows it. Memory counts only if the speed is shown to be the same.
    """
    reference = next(arm for arm in arms.values() if arm.is_reference)
    others = [arm for arm in arms.values() if not (arm.is_reference or arm.is_control)]
    obstacle = _obstacle(reference, others)
    if obstacle:
        return Recommendation(None, (f"No recommendation: {obstacle[0]}", *obstacle[1:]))
    fine = [arm for arm in others if _is_fine(arm)]
    gaining = [arm for arm in fine if _gains(arm, reference)]
    undecided = [arm for arm in others if arm.finished and arm not in fine and not _judged(arm, "worse")]
    of_unknown_speed = [arm for arm in fine if _speedup(arm) is None]
    if gaining:
        arm = max(gaining, key=lambda arm: (_speedup(arm) or 0.0, -_memory_ratio(arm, reference)))
        maybe = [other for other in undecided if not other.errors and not _not_finite_in(other)]
        rivals = [other for other in (*maybe, *of_unknown_speed) if _may_be_faster(other, arm)]
        within = "the margin" if len(_judged(arm)) == 1 else "the margins"
        reasons = _listed([*_gains(arm, reference), f"is not worse in {_names(_judged(arm))} within {within}"])
        return Recommendation(arm.label, (f"Use {code(arm.label)}: it {reasons}.", _what_would_change(arm, rivals)))
    if undecided or of_unknown_speed:
        open_ = [_why_undecided(arm) for arm in undecided]
        open_ += [_why_of_unknown_speed(arm, reference) for arm in of_unknown_speed]
        how = _how_to_decide(undecided) if undecided else _how_to_know_the_speed(of_unknown_speed)
        return Recommendation(None, (f"No recommendation yet: {'; '.join(open_)}.", how, *_speeds(undecided)))
    reasons = "; ".join(_why_not(arm, reference) for arm in others)
    if fine:
        remedy = "A larger model, or a device that computes in half precision, could change that."
    elif any(arm.finished for arm in others):
        remedy = "Larger margins could change that, or an arm with `fp32_modules`."
    else:
        remedy = "Failed runs have to run again before they can be judged."
    return Recommendation(reference.label, (f"Stay with {code(reference.label)}: {reasons}.", remedy))


def _obstacle(reference: Arm, others: Sequence[Arm]) -> list[str]:
    """Return why no arm can be recommended, whatever the results of the other arms are.

    Empty if there is no such reason.
    """
    name = code(reference.label)
    if not others:
        return [f"{name} is the only arm.", "Add a precision to compare it with."]
    if not reference.finished:
        return [f"the reference, {name}, {_failure(reference)}."]
    if not reference.metrics:
        return [f"the reference, {name}, logged no metric in validation, by which precisions could be compared."]
    if not any(_judged(arm) for arm in (reference, *others)):
        known = [name for name, metric in reference.metrics.items() if metric.direction is not None]
        example = f"{known[0]!r}: 0.01" if known else f"{next(iter(reference.metrics))!r}: ('min', 0.01)"
        few = ", and at least three seeds" if len(reference.runs) < LEAST_PAIRS else ""
        pass_them = f"Pass `margins`, for example `margins={{{example}}}`{few}."
        return ["no margin says what a precision may cost.", pass_them, *_speeds(others)]
    lost = _not_finite_in(reference)
    return [f"{_names(lost)} of the reference, {name}, is not finite."] if lost else []


# -- facts about an arm ------------------------------------------------------------------------------------------------


def _judged(arm: Arm, claim: str = "") -> list[ArmMetric]:
    """Return the metrics with a margin, or only the metrics whose verdict is the given claim."""
    judged = [metric for metric in arm.metrics.values() if metric.margin is not None]
    return [metric for metric in judged if metric.verdict.claim == claim] if claim else judged


def _is_fine(arm: Arm) -> bool:
    judged = _judged(arm)
    return bool(judged) and not arm.errors and judged == _judged(arm, "not worse")


def _open_in(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in _judged(arm) if metric.verdict.claim != "not worse"]


def _not_finite_in(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in _judged(arm) if not all(map(math.isfinite, metric.finals.values()))]


def _speedup(arm: Arm) -> float | None:
    """Return how many times as fast as the reference an arm is; `None` if that is undecided or was not measured."""
    return None if arm.speed is None else arm.speed.decided_ratio


def _may_be_faster(arm: Arm, than: Arm) -> bool:
    """Return whether an arm may be faster than another, given the intervals of their speeds."""
    if arm.speed is None or than.speed is None:
        return bool(arm.not_compared)
    return (arm.speed.high or arm.speed.ratio) > (_speedup(than) or 1.0)


def _memory_ratio(arm: Arm, reference: Arm) -> float:
    own, theirs = arm.peak_memory_bytes, reference.peak_memory_bytes
    return own / theirs if own and theirs else 1.0


# -- sentences ---------------------------------------------------------------------------------------------------------


def _less_memory(arm: Arm, reference: Arm) -> str:
    """Write how much less memory an arm needs than the reference; empty if the difference is small."""
    ratio = _memory_ratio(arm, reference)
    return f"needs {100 * (1 - ratio):.0f} % less memory" if ratio < _SMALLER else ""


def _gains(arm: Arm, reference: Arm) -> list[str]:
    """Write the gains of an arm, and the additional memory that they cost.

    Empty if it is slower, or neither faster nor smaller.
    """
    ratio, less, theirs = _memory_ratio(arm, reference), _less_memory(arm, reference), code(reference.label)
    if arm.speed is None or _speedup(arm) is None or arm.speed.claim == "slower":
        return []
    if arm.speed.claim == "faster":
        memory = less or (f"needs {100 * (ratio - 1):.0f} % more memory" if ratio >= 1 / _SMALLER else "")
        return [f"is {arm.speed.in_words(theirs)}", *([memory] if memory else [])]
    return [f"{less} than {theirs}", f"is {arm.speed}"] if less else []


def _what_would_change(arm: Arm, rivals: Sequence[Arm]) -> str:
    """Write which margins would change the verdict, and which undecided arms may be faster."""
    limits = [(metric, metric.highest_cost or 0.0) for metric in _judged(arm)]
    bounds = [f"{rounded(bound)} in {code(metric.name)}" for metric, bound in limits if bound > 0]
    parts: list[str] = []
    if bounds:
        margins = "A margin" if len(bounds) == 1 else "Margins"
        parts.append(f"{margins} below about {_listed(bounds, 'or')} would change that")
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
    return f"{name} is undecided in {_names(_open_in(arm))}"


def _why_of_unknown_speed(arm: Arm, reference: Arm) -> str:
    """Write that an arm is not worse, but cannot be recommended for less memory because its speed is unknown."""
    if arm.speed is None:
        speed = f"its speed was not compared: {arm.not_compared}" if arm.not_compared else "its speed was not measured"
    elif arm.speed.claim == "one run":
        speed = f"its speed was measured with one seed only ({arm.speed})"
    else:
        speed = f"its speed is undecided{f' ({arm.speed.interval})' if arm.speed.interval else ''}"
    less = _less_memory(arm, reference)
    return f"{code(arm.label)} is not worse{f' and {less}' if less else ''}, but {speed}"


def _how_to_decide(undecided: Sequence[Arm]) -> str:
    """Write what would decide about the undecided arms: more seeds, larger margins, or a repair."""
    whole = [arm for arm in undecided if not arm.errors]
    metrics = [metric for arm in whole if not _not_finite_in(arm) for metric in _open_in(arm)]
    if not metrics:
        return "`OverflowLocator` shows where." if whole else "Failed runs have to run again."
    if any(metric.difference is None or len(metric.difference.values) < LEAST_PAIRS for metric in metrics):
        return "It takes at least three seeds to decide."
    needed = [metric.verdict.seeds_needed for metric in metrics if metric.verdict.seeds_needed is not None]
    return f"It takes {in_words(max(needed)) if needed else 'more'} seeds to decide, or larger margins."


def _how_to_know_the_speed(arms: Sequence[Arm]) -> str:
    if all(arm.speed is None for arm in arms):
        return '`measure_speed="alone"` measures each arm in short runs, alone on one device.'
    return "More seeds narrow the interval of a speed."


def _speeds(arms: Sequence[Arm]) -> list[str]:
    known = [f"of {code(arm.label)}: {arm.speed}" for arm in arms if arm.speed is not None]
    return [f"Measured speed {'; '.join(known)}."] if known else []


def _why_not(arm: Arm, reference: Arm) -> str:
    name, worse = code(arm.label), _judged(arm, "worse")
    if not arm.finished:
        return f"{name} {_failure(arm)}"
    if worse:
        return f"{name} is worse in {_names(worse)}"
    if arm.speed is None or arm.speed.claim != "slower":
        return f"{name} is not worse, but neither faster nor smaller"
    less = _less_memory(arm, reference)
    return f"{name} is not worse, but {arm.speed}{f', though it {less}' if less else ''}"


def _failure(arm: Arm) -> str:
    text = next(iter(arm.errors.values()), None)
    if text is None:
        return "did not run"
    return f"failed ({code(textwrap.shorten(text, 120, placeholder=' ...'))})"


def _names(metrics: Sequence[ArmMetric]) -> str:
    return _listed([code(metric.name) for metric in metrics])


def _listed(items: Sequence[str], word: str = "and", most: int = 3) -> str:
    """Write `a`, `a and b`, `a, b and c`, `a, b, c and 2 more`."""
    shown = [*items[:most], f"{len(items) - most} more"] if len(items) > most else list(items)
    return f" {word} ".join([part for part in (", ".join(shown[:-1]), *shown[-1:]) if part])
