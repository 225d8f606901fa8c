"""`host-waits`: the host reads values from the device."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import counted
from lightning_amp.advice.findings._finding import Finding, Seen, Severity, StepRule


def _find(seen: Seen) -> Iterator[Finding]:
    own = [wait for wait in seen.step.recorded.waits if wait.by_user]
    count = sum(wait.count for wait in own)
    if not count:
        return
    on_cpu = seen.machine.device_type == "cpu"
    often = counted(count, "time")
    text = f"The host reads a value from the device {often} in a step: {own[0].operation} in {own[0].where}"
    if len(own) > 1:
        text += f", and in {counted(len(own) - 1, 'other place')}"
    text += ". On a CPU that is free; on a GPU each one waits for all that was queued." if on_cpu else "."
    action = "Keep it on the device (`.detach()` instead of `.item()`), and log with `self.log`, which waits seldom."
    severity: Severity = "note" if on_cpu or count < 2 else "warning"
    yield Finding(severity, "host-waits", text, action, 0.0 if on_cpu else min(0.3, 0.02 * count))


HOST_WAITS = StepRule(_find, {"waits": lambda step: step.recorded.waits})
