"""Which arm to use, why, and what would change that: one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typing_extensions import final

from lightning_amp._text import listed, rounded
from lightning_amp.comparison._arm import Arm, ArmMetric

_SMALLER = 0.95
"""From here on a peak of memory is called smaller: allocators round, and batches differ."""


@final
class Recommendation(NamedTuple):
    """The label of an arm, or `None`, and the sentence that says why."""

    label: str | None
    sentence: str


def recommend(arms: Mapping[str, Arm]) -> Recommendation:
    """Recommend the fastest arm that was shown to be not worse in all metrics that have a margin."""
    reference = next(arm for arm in arms.values() if arm.is_reference)
    others = [arm for arm in arms.values() if not (arm.is_reference or arm.is_control)]
    if not reference.finished:
        why = next(iter(reference.errors.values()), "it did not run")
        return Recommendation(None, f"No recommendation: the reference, `{reference.label}`, failed: {_line(why)}.")
    if not any(metric.margin is not None for arm in arms.values() for metric in arm.metrics.values()):
        text = "No recommendation: no margin says what a precision may cost. Pass `margins`, for example"
        name = next((n for n, m in reference.metrics.items() if m.direction), "val_loss")
        return Recommendation(None, f"{text} `margins={{{name!r}: 0.01}}`, and at least three seeds.{_gains(others)}")
    fine = [arm for arm in others if not arm.errors and _all(arm, "not worse")]
    faster = sorted((arm for arm in fine if speedup(arm, reference) > 1), key=lambda arm: -speedup(arm, reference))
    smaller = [arm for arm in fine if _memory_ratio(arm, reference) < _SMALLER and speedup(arm, reference) >= 1]
    open_arms = [arm for arm in others if arm not in fine and not _any(arm, "worse") and arm.finished]
    better = [arm for arm in open_arms if speedup(arm, reference) > (speedup(faster[0], reference) if faster else 1)]
    if faster or smaller:
        arm = (faster or smaller)[0]
        gain = f"it is {arm.speed} as" if faster else f"it needs {_saved(arm, reference)} less memory than"
        names = listed([f"`{m.name}`" for m in arm.metrics.values() if m.margin is not None])
        text = f"Use `{arm.label}`: {gain} `{reference.label}`, and not worse in {names} within the margins"
        return Recommendation(arm.label, f"{text}. {_what_would_change(arm, better)}")
    if open_arms:
        text = "; ".join(f"`{arm.label}` is undecided in {_undecided(arm)}" for arm in open_arms)
        return Recommendation(None, f"No recommendation yet: {text}.{_gains(open_arms)}")
    if fine:
        text = f"{_labels(fine)} {'is' if len(fine) == 1 else 'are'} not worse, but neither faster nor smaller"
        advice = "A larger model, or a device that computes in half precision, would change that."
        return Recommendation(reference.label, f"Stay with `{reference.label}`: {text} here. {advice}")
    reasons = "; ".join(f"`{arm.label}` {_reason(arm)}" for arm in others)
    text = f"Stay with `{reference.label}`: {reasons}."
    return Recommendation(reference.label, f"{text} Larger margins would change that, or a remedy in the guides.")


def speedup(arm: Arm, reference: Arm) -> float:
    """Return how many times as fast as the reference an arm is; 1 if that is within noise or unknown."""
    own, theirs = arm.step_s, reference.step_s
    if own is None or theirs is None or arm.speed.startswith("within noise"):
        return 1.0
    return theirs.median / own.median


def _memory_ratio(arm: Arm, reference: Arm) -> float:
    own, theirs = arm.peak_memory_bytes, reference.peak_memory_bytes
    return own / theirs if own and theirs else 1.0


def _saved(arm: Arm, reference: Arm) -> str:
    return f"{1 - _memory_ratio(arm, reference):.0%}"


def _judged(arm: Arm) -> list[ArmMetric]:
    return [metric for metric in arm.metrics.values() if metric.margin is not None]


def _all(arm: Arm, verdict: str) -> bool:
    return bool(_judged(arm)) and all(metric.verdict.startswith(verdict) for metric in _judged(arm))


def _any(arm: Arm, verdict: str) -> bool:
    return any(metric.verdict.startswith(verdict) for metric in _judged(arm))


def _undecided(arm: Arm) -> str:
    return listed([f"`{m.name}` ({_line(m.verdict)})" for m in _judged(arm) if m.verdict.startswith("undecided")])


def _reason(arm: Arm) -> str:
    if not arm.finished:
        return f"failed ({_line(next(iter(arm.errors.values()), 'it did not run'))})"
    return f"is worse in {listed([f'`{m.name}`' for m in _judged(arm) if m.verdict.startswith('worse')])}"


def _what_would_change(arm: Arm, better: Sequence[Arm]) -> str:
    """Name the margin at which the verdict would fall, and faster arms that are undecided."""
    parts: list[str] = []
    for metric in _judged(arm):
        bound = metric.highest_cost
        if bound is not None and bound > 0:
            parts.append(f"a margin of `{metric.name}` below about {rounded(bound)}")
    if better:
        parts.append(f"more seeds, since {_labels(better)} would be faster and is undecided")
    if not parts:
        return "A run with other data or a longer one could change that."
    return f"{' or '.join(parts)} would change that."[0].upper() + f"{' or '.join(parts)} would change that."[1:]


def _gains(arms: Sequence[Arm]) -> str:
    known = [f"`{arm.label}` is {arm.speed_in_short}" for arm in arms if arm.speed]
    return f" In speed, {listed(known)}." if known else ""


def _labels(arms: Sequence[Arm]) -> str:
    return listed([f"`{arm.label}`" for arm in arms])


def _line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
