"""What follows from a record: findings, each with its number and the next thing to do. Read `_finding.py` first.

To add a finding about a step: write one file here, with the fact that it derives from the record
(:class:`~lightning_amp.advice._record.Step`), its rule and its words, and name it in `OF_A_STEP`. A finding about the
machine alone is a function that `of_the_machine` calls. Nothing else has to know it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._channels_last import CHANNELS_LAST
from lightning_amp.advice.findings._data_bound import DATA_BOUND
from lightning_amp.advice.findings._emulated_precision import emulated_precision
from lightning_amp.advice.findings._finding import Finding, Seen, Severity, StepRule, worst_first
from lightning_amp.advice.findings._fp32_products import FP32_PRODUCTS
from lightning_amp.advice.findings._host_waits import HOST_WAITS
from lightning_amp.advice.findings._large_logits import LARGE_LOGITS
from lightning_amp.advice.findings._many_casts import MANY_CASTS
from lightning_amp.advice.findings._memory_not_lower import MEMORY_NOT_LOWER
from lightning_amp.advice.findings._no_faster_products import no_faster_products
from lightning_amp.advice.findings._not_faster import NOT_FASTER
from lightning_amp.advice.findings._nothing_to_do import nothing_to_do, summary
from lightning_amp.advice.findings._optimizer_not_fused import OPTIMIZER_NOT_FUSED
from lightning_amp.advice.findings._precision import precision
from lightning_amp.advice.findings._sizes_not_aligned import SIZES_NOT_ALIGNED, unaligned
from lightning_amp.advice.findings._slow_callback import SLOW_CALLBACK
from lightning_amp.advice.findings._slow_settings import SLOW_SETTINGS
from lightning_amp.advice.findings._state_dominates import STATE_DOMINATES
from lightning_amp.advice.findings._tf32_off import tf32_off
from lightning_amp.advice.findings._version_trap import known_traps, version_trap
from lightning_amp.advice.findings._words import duration, in_fp32

__all__ = [
    "Finding",
    "Severity",
    "all_findings",
    "duration",
    "facts_of",
    "in_fp32",
    "known_traps",
    "summary",
    "unaligned",
]

OF_A_STEP: tuple[StepRule, ...] = (
    FP32_PRODUCTS,
    MANY_CASTS,
    DATA_BOUND,
    SIZES_NOT_ALIGNED,
    OPTIMIZER_NOT_FUSED,
    CHANNELS_LAST,
    HOST_WAITS,
    SLOW_CALLBACK,
    SLOW_SETTINGS,
    NOT_FASTER,
    LARGE_LOGITS,
    STATE_DOMINATES,
    MEMORY_NOT_LOWER,
)
"""In the order in which findings of equal weight are told."""


def of_the_machine(machine: Machine, decision: Decision, step: Step | None) -> Iterator[Finding]:
    """Yield what there is to say of the machine; beside a step only what concerns it."""
    yield from emulated_precision(machine, decision, step)
    if step is None:
        yield from no_faster_products(machine, decision)
    yield from tf32_off(machine)
    yield from version_trap(machine, step)
    if step is None:
        yield precision(machine, decision)


def all_findings(machine: Machine, decision: Decision, step: Step | None) -> tuple[Finding, ...]:
    """Return what was found, worst first; never empty."""
    found = [*of_the_machine(machine, decision, step)]
    if step is not None:
        seen = Seen(step, machine, decision)
        found += [finding for rule in OF_A_STEP for finding in rule.find(seen)]
        found += nothing_to_do(seen, found)
    return worst_first(found)


def facts_of(step: Step) -> dict[str, object]:
    """Return the facts that findings derive from a record, by name."""
    return {name: derive(step) for rule in OF_A_STEP for name, derive in rule.facts.items()}
