"""Compare the speed of two variants of a step, and cap a gain at the highest possible one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_amp.advice._record import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    IN_FP32,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
    Label,
    Step,
)
from lightning_amp.measure import BACKWARD, DATA, FORWARD, OPTIMIZER, SCALING, SpeedComparison

LOOKS = 2
"""Number of times that a race is judged: after its first rounds, and at its end."""

_WORTH = 1.05
"""A gain below 5 % is no warning, however sure it is."""
_PARTS: dict[Label, tuple[str, ...]] = {
    FUSED: (OPTIMIZER, SCALING),
    CHANNELS_LAST: (FORWARD, BACKWARD),
    WITHOUT_RULES: (FORWARD, BACKWARD),
    LARGER_BATCH: (),
}
"""The parts of a step that a change can make faster."""


def compare(contestant_s: Sequence[float], reference_s: Sequence[float], among: int = LOOKS) -> SpeedComparison | None:
    """Compare two series of seconds, paired by round; `None` if they have no round in common.

    `among` is the number of comparisons behind one sentence: the chance that any of them is wrong is 1 % at most.
    """
    return SpeedComparison.of_rounds(contestant_s, reference_s, 1 - 0.01 / among)


def measured(step: Step, label: Label, base: Label = AS_IT_IS) -> SpeedComparison | None:
    """Return the measured speed of a variant relative to another; `None` if one of them was not timed."""
    changed, before = step.variant(label), step.variant(base)
    return None if changed is None or before is None else compare(changed.step_s, before.step_s)


def gain(step: Step, label: Label) -> SpeedComparison | None:
    """Return the speed of a variant relative to the unchanged step, limited by :func:`most_gain`.

    `None` if it was not timed, or if its whole interval lies above that limit, which only noise can cause.
    """
    found, most = measured(step, label), most_gain(step, label)
    if found is None or found.ratio <= most:
        return found
    if found.low is None or found.high is None or found.low > most:
        return None
    return replace(found, ratio=most, high=min(found.high, most))


def most_gain(step: Step, label: Label) -> float:
    """Return the highest possible gain of a change (Amdahl): all other parts of the step keep their time."""
    if label not in _PARTS or not step.parts:
        return math.inf
    whole = sum(seconds for part, seconds in step.parts.items() if part != DATA)  # races time no loading
    share = sum(step.parts.get(part, 0.0) for part in _PARTS[label]) / max(whole, 1e-12)
    return 1 / (1 - share) if share < 1 else math.inf


def is_worth_it(found: SpeedComparison | None) -> bool:
    """Return whether a change is shown to be faster, and by 5 % or more."""
    return found is not None and found.claim == "faster" and found.ratio >= _WORTH


def speed_up(step: Step) -> SpeedComparison | None:
    """Return the speed of the step relative to fp32; `None` if one of them was not timed."""
    return measured(step, AS_IT_IS, IN_FP32)


def more_rows(step: Step) -> SpeedComparison | None:
    """Return the rows per second of a larger batch, relative to the unchanged step; `None` if it was not timed."""
    found = gain(step, LARGER_BATCH)
    if found is None:
        return None
    low, high = (None if end is None else TIMES_LARGER * end for end in (found.low, found.high))
    return SpeedComparison(TIMES_LARGER * found.ratio, low, high, found.num_repetitions)


def best_speed_up(step: Step, products: float) -> float:
    """Return the highest possible speed-up (Amdahl) if products in half precision are faster by a given ratio."""
    share = step.fp32_product_share
    return 1 / (1 - share + share / products) if products > 0 else 1.0
