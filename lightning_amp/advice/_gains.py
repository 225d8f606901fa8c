"""How much faster one variant of a step is than another, and whether that is more than noise."""

from __future__ import annotations

from statistics import quantiles
from typing import NamedTuple

from typing_extensions import final

from lightning_amp._text import counted, rounded, span
from lightning_amp.advice._step_facts import Step

AS_IT_IS = "as it is"
IN_FP32 = "fp32"
FUSED = "fused=True"
CHANNELS_LAST = "channels_last"
WITHOUT_RULES = "without fp32_modules"
LARGER_BATCH = "4 times the batch"
TIMES_LARGER = 4

_CLEARLY = 1.05
_FEW, _MANY = 3, 5


@final
class Gain(NamedTuple):
    """A ratio of times, paired by round: above 1 is faster.

    Attributes:
        ratio: The median.
        low: Lower end of the middle half.
        high: Upper end of the middle half.
        lowest: Of all rounds.
        highest: Of all rounds.
        rounds: How many.

    """

    ratio: float
    low: float
    high: float
    lowest: float
    highest: float
    rounds: int

    @property
    def is_sure(self) -> bool:
        """Return whether there are enough rounds to say anything."""
        return self.rounds >= _FEW

    @property
    def is_clear(self) -> bool:
        """Return whether it is faster by more than noise and by more than 5 %."""
        low = self.low if self.rounds >= _MANY else self.lowest
        return self.is_sure and self.ratio >= _CLEARLY and low > 1.0

    @property
    def is_loss(self) -> bool:
        """Return whether it is slower by more than noise and by more than 5 %."""
        high = self.high if self.rounds >= _MANY else self.highest
        return self.is_sure and self.ratio <= 1 / _CLEARLY and high < 1.0

    @property
    def words(self) -> str:
        """Return it in words: `1.62 times as fast (middle half 1.55 to 1.71 of 7 rounds)`."""
        ends = span([rounded(self.low), rounded(self.high)])
        return f"{rounded(self.ratio)} times as fast (middle half {ends} of {counted(self.rounds, 'round')})"


def gain(step: Step, label: str, base: str = AS_IT_IS) -> Gain | None:
    """Return how much faster a variant is than another one; `None` if one of them was not timed."""
    changed, before = step.variant(label), step.variant(base)
    if changed is None or before is None:
        return None
    ratios = sorted(b / a for a, b in zip(changed.step_s, before.step_s, strict=False) if a > 0)
    if not ratios:
        return None
    if len(ratios) == 1:
        only = ratios[0]
        return Gain(only, only, only, only, only, 1)
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return Gain(middle, low, high, ratios[0], ratios[-1], len(ratios))


def speed_up(step: Step) -> Gain | None:
    """Return how much faster the step is than in fp32."""
    return gain(step, AS_IT_IS, IN_FP32)


def best_speed_up(step: Step, products: float) -> float:
    """Return what is possible at best, by Amdahl's law.

    Args:
        step: With the share of products in fp32.
        products: How many times as fast these products are in half precision.

    """
    share = step.fp32_product_share
    return 1 / (1 - share + share / products) if products > 0 else 1.0
