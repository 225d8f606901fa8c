"""`anomaly-detection` and `deterministic`: settings of the process that cost time."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp.advice._record import Setting
from lightning_amp.advice.findings._finding import Finding, Seen, StepRule

_FINDINGS: dict[Setting, Finding] = {
    "anomaly detection": Finding(
        "warning",
        "anomaly-detection",
        "Anomaly detection is on (`detect_anomaly=True`): it checks every gradient and keeps every stack.",
        "Turn it off, but to search for a NaN.",
        0.5,
    ),
    "deterministic algorithms": Finding(
        "note",
        "deterministic",
        "Deterministic algorithms are on, which may be several times as slow.",
        "Turn `deterministic` off where you do not need the same bits.",
    ),
}


def _find(seen: Seen) -> Iterator[Finding]:
    for setting in seen.step.settings:
        yield _FINDINGS[setting]


SLOW_SETTINGS = StepRule(_find)
