"""`host-waits`, `slow-callback`, `anomaly-detection` and `deterministic`: work of the host that slows down a step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import counted, percent
from lightning_amp.advice._record import Setting
from lightning_amp.advice.findings._finding import Evidence, Finding, Severity, graded
from lightning_amp.advice.findings._words import in_ms
from lightning_amp.measure import CALLBACKS


def host_waits(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if lines of the user's code read values from the device.

    On a CPU, the finding is a note at most.
    """
    own = [wait for wait in evidence.step.recorded.waits if wait.by_user]
    count = sum(wait.count for wait in own)
    if not count:
        return
    on_cpu = evidence.machine.device_type == "cpu"
    often = counted(count, "time")
    text = f"The host reads a value from the device {often} in a step: {own[0].operation} in {own[0].where}"
    if len(own) > 1:
        text += f", and in {counted(len(own) - 1, 'other place')}"
    text += ". On a CPU that is free; on a GPU each read waits for everything that was queued." if on_cpu else "."
    action = "Keep it on the device (`.detach()` instead of `.item()`), and log with `self.log`, which rarely waits."
    severity: Severity = "note" if on_cpu or count < 2 else "warning"
    yield Finding(severity, "host-waits", text, action, 0.0 if on_cpu else min(0.3, 0.02 * count))


def slow_callback(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding with the name of the slowest callback; from a fifth of a step on, it is a warning."""
    share = evidence.step.share(CALLBACKS)
    if share < 0.1:
        return
    name, seconds = max(evidence.step.callbacks.items(), key=lambda item: item[1])
    text = f"Callbacks take {percent(share)} of a step, most of it `{name}`: {in_ms(seconds)}."
    yield Finding(graded(share, 0.2), "slow-callback", text, "Let it work less often, or outside of training.", share)


_FINDINGS: dict[Setting, Finding] = {
    "anomaly detection": Finding(
        "warning",
        "anomaly-detection",
        "Anomaly detection is on (`detect_anomaly=True`): it checks every gradient and keeps every stack.",
        "Turn it off unless you are searching for a NaN.",
        0.5,
    ),
    "deterministic algorithms": Finding(
        "note",
        "deterministic",
        "Deterministic algorithms are on, which may be several times as slow.",
        "Turn `deterministic` off if two runs need not have the same bits.",
    ),
}


def slow_settings(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for anomaly detection and one for deterministic algorithms, if they are on."""
    for setting in evidence.step.settings:
        yield _FINDINGS[setting]
