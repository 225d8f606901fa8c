"""What a claim is, what its run returns, and how figures decide a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from typing_extensions import final

from lightning_amp.measure._speed import t_quantile

Verdict = Literal["reproduced", "not reproduced", "depends", "undecided", "needs a GPU", "failed"]
"""`"undecided"`: the interval contains the threshold. `"failed"`: the run raised an error."""


@final
class Setting(NamedTuple):
    """Where and how thoroughly a claim is measured.

    Attributes:
        device_type: `"cpu"` or `"cuda"`.
        tiny: A rehearsal with the smallest sizes, whose figures mean nothing.
    """

    device_type: str
    tiny: bool = False

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.device_type)

    @property
    def seeds(self) -> range:
        """Return the eight seeds of a claim about training; two in a rehearsal."""
        return range(2 if self.tiny else 8)


@final
class Outcome(NamedTuple):
    """The result of a run: the verdict, its figure for the table, and more figures for the section."""

    verdict: Verdict
    figure: str
    details: str = ""


@final
@dataclass(frozen=True)
class Claim:
    """A claim of the literature.

    Attributes:
        title: The claim in a few words.
        source: Who makes it, in Markdown.
        protocol: What is measured, and the threshold of the verdict.
        run: Measures, and decides by the figures.
    """

    title: str
    source: str
    protocol: str
    run: Callable[[Setting], Outcome]


@final
class Interval(NamedTuple):
    """A mean with its 95 % confidence interval over seeds (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Return the interval of the mean of two or more values."""
        found = list(values)
        mean = statistics.fmean(found)
        reach = t_quantile(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
        return cls(mean, mean - reach, mean + reach)

    def within(self, low: float, high: float) -> Verdict:
        """Judge the claim that the true mean lies between two thresholds."""
        if low <= self.low and self.high <= high:
            return "reproduced"
        return "not reproduced" if self.high < low or self.low > high else "undecided"

    def text(self, form: str = ".3g", factor: float = 1.0, unit: str = "") -> str:
        """Write it: `0.12 (0.10 to 0.14)`."""
        mean, low, high = (format(factor * value, form) for value in self)
        return f"{mean}{unit} ({low} to {high})"


def decided(is_true: bool) -> Verdict:
    """Return the verdict on a claim without chance."""
    return "reproduced" if is_true else "not reproduced"


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict over several cases: `"depends"` if some reproduce the claim and others do not."""
    found = set(verdicts)
    if {"reproduced", "not reproduced"} <= found:
        return "depends"
    return found.pop() if len(found) == 1 else "undecided"


def both(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim that has several parts, all of which must hold."""
    found = set(verdicts)
    return "not reproduced" if "not reproduced" in found else overall(found)
