"""Whether bf16 without a scaler ends where fp16 with one ends."""

from __future__ import annotations

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import KALAMKAR
from benchmarks.claims._training import differences


def run(setting: Setting) -> Outcome:
    """Compare the final validation losses."""
    found = Interval.of(differences(setting, "bf16", "fp16"))
    return Outcome(found.within(-0.01, 0.01), found.text("+.4f", 100, " %"))


CLAIM = Claim(
    "bf16 needs no scaler",
    KALAMKAR,
    "Relative difference of a GPT's final validation loss, bf16 against fp16; within 1 %.",
    run,
)
