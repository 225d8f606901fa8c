"""Whether bf16 weights train worse, and fp32 weights cure it."""

from __future__ import annotations

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, both
from benchmarks.claims._sources import ZAMIRAI
from benchmarks.claims._training import differences


def run(setting: Setting) -> Outcome:
    """Compare final validation losses with those of fp32 weights and bf16 autocast."""
    pure = Interval.of(differences(setting, "bf16 weights", "bf16"))
    cured = Interval.of(differences(setting, "fp32 weights from bf16", "bf16"))
    details = f"With it: {cured.text('+.2g', 100, ' %')}."
    verdict = both([pure.within(0.001, 1e9), cured.within(-1e9, 0.01)])
    return Outcome(verdict, pure.text("+.2g", 100, " %"), details)


CLAIM = Claim(
    "bf16 weights train worse",
    ZAMIRAI,
    "The same loss against fp32 weights: over 0.1 % worse, but at most 1 % with `upcast_parameters`.",
    run,
)
