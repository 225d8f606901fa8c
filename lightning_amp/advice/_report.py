"""`DoctorReport`: what :func:`lightning_amp.doctor` found."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cached_property

from typing_extensions import final, override

from lightning_amp._files import write_atomically
from lightning_amp._plain_data import plain
from lightning_amp.advice import _words
from lightning_amp.advice._decision import Decision, decide
from lightning_amp.advice._findings import Finding, worst_first
from lightning_amp.advice._gains import AS_IT_IS
from lightning_amp.advice._machine_facts import Machine
from lightning_amp.advice._machine_rules import machine_findings, verdict
from lightning_amp.advice._memory_rules import memory_findings
from lightning_amp.advice._speed_rules import speed_findings
from lightning_amp.advice._step_facts import Step

_FORMAT = 1


@final
class DoctorReport:
    """What :func:`lightning_amp.doctor` found: findings, worst first, and the measurements that they follow from.

    .. code-block:: python

        report = doctor()
        print(report)
        print([finding.code for finding in report.findings if finding.is_problem])
        report.to_json("doctor.json")

    Args:
        machine: What the machine can do.
        step: What a training step does; `None` if only the machine was looked at.
        precision: Which precision is going to be used, as :class:`AmpPrecision` names it.

    Attributes:
        machine: What the machine can do.
        step: What a training step does; `None` if only the machine was looked at.
        precision: Which precision this is about.

    """

    def __init__(self, machine: Machine, step: Step | None = None, precision: str | None = None) -> None:
        self.machine, self.step = machine, step
        self.precision = precision or (step.precision if step is not None else machine.precision)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Return what was found, worst first; never empty."""
        decision = self.decision
        found = list(machine_findings(self.machine, decision, self.step))
        if self.step is None:
            found.append(verdict(self.machine, decision))
        else:
            found += [*speed_findings(self.step, self.machine, decision), *memory_findings(self.step, self.machine)]
            as_it_is = self.step.variant(AS_IT_IS)
            if as_it_is is None:
                errors = [variant.error for variant in self.step.variants if variant.label == AS_IT_IS]
                text = f"The step could not be timed beside others, so nothing was tried: {' '.join(errors)}."
                found.append(Finding("note", "not-timed", text, "Look at the table of parts, which was measured."))
            elif not any(finding.is_problem for finding in found):
                found.append(Finding("ok", "nothing-to-do", f"{self._nothing} {_words.summary(self.step)}"))
        return worst_first(found)

    @cached_property
    def decision(self) -> Decision:
        """Return the recommended precision and its basis; every finding agrees with it."""
        return decide(self.machine, self.precision, self.step)

    @property
    def _nothing(self) -> str:
        speed = self.decision.speed
        is_open = speed is not None and self.decision.use is None and speed.decided_ratio is None
        return "Nothing was found to change." if is_open else "Nothing to do."

    @property
    def has_problems(self) -> bool:
        """Return whether a finding is a warning or an error."""
        return any(finding.is_problem for finding in self.findings)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({[finding.code for finding in self.findings]})"

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Write the findings, and what was measured, as Markdown."""
        return _words.to_markdown(self.findings, self.machine, self.step)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the findings and all that was measured, to a path or a URL. NaN and infinities are texts."""
        data = plain(
            {
                "format": _FORMAT,
                "precision": self.precision,
                "decision": asdict(self.decision),
                "findings": [asdict(finding) for finding in self.findings],
                "machine": asdict(self.machine),
                "step": None if self.step is None else asdict(self.step),
            }
        )
        write_atomically(path, lambda file: file.write(json.dumps(data, indent=1, allow_nan=False)))
