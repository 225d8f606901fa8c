"""`anomaly-detection` and `deterministic`: settings of the process that cost time."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp.advice.findings._finding import Finding, Seen, StepRule


def _find(seen: Seen) -> Iterator[Finding]:
    if "anomaly detection" in seen.step.settings:
        text = "Anomaly detection is on (`detect_anomaly=True`): it checks every gradient and keeps every stack."
        yield Finding("warning", "anomaly-detection", text, "Turn it off, but to search for a NaN.", 0.5)
    if "deterministic algorithms" in seen.step.settings:
        text = "Deterministic algorithms are on, which may be several times as slow."
        yield Finding("note", "deterministic", text, "Turn `deterministic` off where you do not need the same bits.")


SLOW_SETTINGS = StepRule(_find)
