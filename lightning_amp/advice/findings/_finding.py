"""`Finding`: one thing that was found, with its measured number and the next thing to do. And a rule that finds one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from typing_extensions import final

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Step

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@final
@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: `"error"`: mixed precision cannot help like this. `"warning"`: there is something to gain, and it was
            measured. `"note"`: worth knowing. `"ok"`: nothing was found.
        code: Stable, in kebab case, for scripts.
        message: One or two sentences with the measured number.
        action: The next thing to do; empty if there is none.
        share: What it is about, as a share of the time of a step or of its memory, 0 to 1. The larger the worse.

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
class Seen:
    """All that a finding about a step may read: the record, the machine, and the precision that is recommended."""

    step: Step
    machine: Machine
    decision: Decision


@final
@dataclass(frozen=True)
class StepRule:
    """One finding about a step.

    Attributes:
        find: Yields it, if it is there.
        facts: What it derives from the record, by the key under which JSON holds it.

    """

    find: Callable[[Seen], Iterator[Finding]]
    facts: Mapping[str, Callable[[Step], object]] = field(default_factory=dict)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return them in their order: by severity, then by what they are worth."""
    return tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), -f.share)))


def graded(share: float, warning: float) -> Severity:
    """Return how severe a finding about a share of a step is: a warning from `warning` on."""
    return "warning" if share >= warning else "note"
