"""Whether a model may be evaluated in another precision than that of its training."""

from __future__ import annotations

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, both
from benchmarks.claims._sources import MICIKEVICIUS
from benchmarks.claims._training import trained


def run(setting: Setting) -> Outcome:
    """Evaluate trained models in the precision of their training and in fp32."""
    found = {how: Interval.of(_difference(setting, how, seed) for seed in setting.seeds) for how in ("bf16", "fp16")}
    figure = ", ".join(f"{how} {interval.text('+.4f', 100, ' %')}" for how, interval in found.items())
    return Outcome(both(interval.within(-0.001, 0.001) for interval in found.values()), figure)


def _difference(setting: Setting, how: str, seed: int) -> float:
    model = trained(setting, how, seed)
    return (model.val_loss - model.val_loss_as_trained) / model.val_loss_as_trained


CLAIM = Claim(
    "Evaluation may use another precision",
    MICIKEVICIUS,
    "The same loss, evaluated in fp32 against the precision of training; within 0.1 %.",
    run,
)
