"""Findings: each has a measured number and the next thing to do. Read `_finding.py` first.

A finding is one function: it derives a fact from the record of a step (`_step.py`) and the machine (`_machine.py`),
applies a rule, and writes a sentence. To add one, name the function in `ALL`. None of this needs Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from lightning_amp.advice._machine import Machine
from lightning_amp.advice._step import Step
from lightning_amp.advice.findings._costs import (
    channels_last,
    data_bound,
    host_waits,
    large_logits,
    optimizer_not_fused,
    overflow,
    state_dominates,
)
from lightning_amp.advice.findings._finding import Decision, Finding, Severity
from lightning_amp.advice.findings._products import (
    autocast_off,
    emulated_precision,
    fp32_modules_dominate,
    many_casts,
    model_too_small,
    sizes_not_aligned,
)

ALL: Sequence[Callable[[Step, Machine, Decision], Finding | None]] = (
    overflow,
    autocast_off,
    fp32_modules_dominate,
    many_casts,
    data_bound,
    sizes_not_aligned,
    optimizer_not_fused,
    channels_last,
    host_waits,
    emulated_precision,
    model_too_small,
    large_logits,
    state_dominates,
)
"""Findings of equal severity and share are printed in this order."""


def findings_of(machine: Machine, decision: Decision, step: Step | None) -> tuple[Finding, ...]:
    """Return all findings, worst first; there is always one."""
    if step is None:
        made = [emulated_precision(step, machine, decision)]
    else:
        made = [find(step, machine, decision) for find in ALL]
    found = [finding for finding in made if finding is not None]
    if not any(finding.is_problem for finding in found):
        text = "Nothing has to change; notes are optional." if found else "Nothing was found to change."
        found.append(Finding("ok", "nothing-to-do", text))
    return tuple(sorted(found, key=lambda finding: (get_args(Severity).index(finding.severity), -finding.share)))
