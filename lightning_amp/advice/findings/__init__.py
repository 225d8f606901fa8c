"""Findings: each has a measured number and the next thing to do. Read `_finding.py` first.

A finding about a step is one function. It derives a fact from the record (:class:`~lightning_amp.advice._record.Step`),
applies a rule to it, and writes the text. To add one, name the function in `ABOUT_A_STEP`. A finding about the machine
alone is a function that `about_the_machine` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._record import Step
from lightning_amp.advice.findings._data_bound import data_bound
from lightning_amp.advice.findings._finding import Evidence, Finding, Severity, worst_first
from lightning_amp.advice.findings._fp32_products import fp32_products, products_in_fp32
from lightning_amp.advice.findings._host import host_waits, slow_callback, slow_settings
from lightning_amp.advice.findings._machine_support import emulated_precision, precision, tf32_off
from lightning_amp.advice.findings._many_casts import cast_sites, many_casts
from lightning_amp.advice.findings._memory_use import large_logits, largest_loss, memory_not_lower, state_dominates
from lightning_amp.advice.findings._not_faster import no_faster_products, not_faster, slower_products
from lightning_amp.advice.findings._nothing_to_do import nothing_to_do, summary
from lightning_amp.advice.findings._sizes_not_aligned import sizes_not_aligned, unaligned
from lightning_amp.advice.findings._tried_changes import channels_last, optimizer_not_fused
from lightning_amp.advice.findings._version_trap import known_traps, version_trap
from lightning_amp.advice.findings._words import duration

__all__ = [
    "Finding",
    "Severity",
    "all_findings",
    "duration",
    "facts_of",
    "known_traps",
    "summary",
    "unaligned",
]

ABOUT_A_STEP: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    products_in_fp32,
    many_casts,
    data_bound,
    sizes_not_aligned,
    optimizer_not_fused,
    channels_last,
    host_waits,
    slow_callback,
    slow_settings,
    not_faster,
    large_logits,
    state_dominates,
    memory_not_lower,
)
"""Findings of equal severity and share are printed in this order."""


def about_the_machine(machine: Machine, decision: Decision, step: Step | None) -> Iterator[Finding]:
    """Yield the findings about the machine; with a step, leave out the findings that do not concern it."""
    yield from emulated_precision(machine, decision, step)
    if step is None:
        yield from no_faster_products(machine, decision)
    yield from tf32_off(machine)
    yield from version_trap(machine, step)
    if step is None:
        yield precision(machine, decision)


def all_findings(machine: Machine, decision: Decision, step: Step | None) -> tuple[Finding, ...]:
    """Return all findings, worst first; there is always one."""
    found = [*about_the_machine(machine, decision, step)]
    if step is not None:
        evidence = Evidence(step, machine, decision)
        found += [finding for find in ABOUT_A_STEP for finding in find(evidence)]
        found += nothing_to_do(evidence, found)
    return worst_first(found)


def facts_of(step: Step) -> dict[str, object]:
    """Return the facts that findings derive from a record, under their names in the JSON file."""
    return {
        "reasons": fp32_products(step),
        "casts": cast_sites(step),
        "waits": step.recorded.waits,
        "slower": slower_products(step),
        "logits": largest_loss(step),
    }
