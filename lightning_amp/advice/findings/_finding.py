"""`Finding`: one thing that the doctor found, with its measured number and the next thing to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import final

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Step

Severity = Literal["error", "warning", "note", "ok"]


@final
@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found.

    Attributes:
        severity: `"error"`: mixed precision cannot help like this. `"warning"`: a change gains something, and the gain
            was measured. `"note"`: worth knowing. `"ok"`: nothing is wrong.
        code: A stable name in kebab case, for scripts.
        message: One or two sentences with the measured number.
        action: The next thing to do; empty if there is none.
        share: The affected share of the time or memory of a step, from 0 to 1. Larger is worse.

    """

    severity: Severity
    code: str
    message: str
    action: str = ""
    share: float = 0.0

    @property
    def is_problem(self) -> bool:
        """Return whether there is something to do."""
        return self.severity in ("error", "warning")


@final
@dataclass(frozen=True)
class Evidence:
    """Everything that a finding about a step may read."""

    step: Step
    machine: Machine
    decision: Decision


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity, then by their share."""
    return tuple(sorted(findings, key=lambda f: (get_args(Severity).index(f.severity), -f.share)))


def graded(share: float, warning: float) -> Severity:
    """Return `"warning"` if a share of a step reaches the bound, else `"note"`."""
    return "warning" if share >= warning else "note"
