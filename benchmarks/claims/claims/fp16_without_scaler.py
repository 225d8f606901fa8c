"""Whether fp16 without loss scaling trains worse."""

from __future__ import annotations

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import MICIKEVICIUS
from benchmarks.claims._training import differences


def run(setting: Setting) -> Outcome:
    """Compare the final validation losses of fp16 with a constant scale of 1 and of fp32."""
    alone = Interval.of(differences(setting, "fp16, not scaled"))
    return Outcome(alone.within(0.001, 1e9), alone.text("+.4f", 100, " %"))


CLAIM = Claim(
    "fp16 without scaling trains worse",
    MICIKEVICIUS,
    "The same loss, fp16 at scale 1 against fp32; over 0.1 % worse.",
    run,
)
