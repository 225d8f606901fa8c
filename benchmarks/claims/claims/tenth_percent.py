"""Whether final metrics differ by less than 0.1 %."""

from __future__ import annotations

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, decided, overall
from benchmarks.claims._sources import BLOG
from benchmarks.claims._training import differences

_MOST = 0.001


def run(setting: Setting) -> Outcome:
    """Judge the mean over the seeds, and the largest difference of a single run."""
    figures: list[str] = []
    means: list[Interval] = []
    worst: list[float] = []
    for how in ("bf16", "fp16"):
        found = differences(setting, how)
        means.append(Interval.of(found))
        worst.append(max(map(abs, found)))
        figures.append(f"{how} {means[-1].text('+.4f', 100, ' %')}, largest {100 * worst[-1]:.4f} %")
    verdict = overall([*(mean.within(-_MOST, _MOST) for mean in means), *(decided(w < _MOST) for w in worst)])
    return Outcome(verdict, "; ".join(figures))


CLAIM = Claim(
    "Final metrics differ by less than 0.1 %",
    BLOG,
    "The same loss, bf16 and fp16 against fp32: the mean, and single runs.",
    run,
)
