"""Run `doctor` on slow projects with a known reason and on healthy ones, apply its advice, and time the result.

`python -m tests.benchmarks.doctor_projects [NAME ...]` prints a Markdown table in some five minutes.
"""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

import torch

sys.path.insert(0, "tests")


def main(names: list[str]) -> None:
    from zoo.slow import HEALTHY, SLOW

    from lightning_amp import doctor
    from lightning_amp.advice import _machine

    memory_bytes = _machine._memory_bytes
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads\n")
    print(
        "| project | diagnosis is right | findings | time of a step, before and after the fix"
        " | peak memory, before and after the fix | time of the diagnosis |"
    )
    print("|---|---|---|---|---|---|")
    said: list[str] = []
    wrong = 0
    for name, case in {**SLOW, **HEALTHY}.items():
        if names and not any(part in name for part in names):
            continue
        _machine._memory_bytes = lambda device, own=case.memory_gib: int(own * 2**30) or memory_bytes(device)
        start = time.perf_counter()
        report = doctor(**case.arguments())
        elapsed = time.perf_counter() - start
        cured = doctor(**case.arguments(cured=True)) if case.cured else None
        right = is_right(case.code, report, cured)
        wrong += not right
        row = [name, "yes" if right else "NO", codes(report), *before_and_after(report, cured), f"{elapsed:.0f} s"]
        print(f"| {' | '.join(row)} |", flush=True)
        for finding in report.findings:
            if finding.code == case.code or (not case.code and finding.is_problem):
                said.append(f"**{name}**: {finding.message} *{finding.action}*")
    print(f"\n{wrong} wrong.\n\n" + "\n\n".join(said))


def is_right(code: str, report: Any, cured: Any) -> bool:
    """Return whether the reason was named and its cure removes it, or whether a healthy project got no advice."""
    if not code:
        return not report.has_problems
    left = {finding.code: finding.severity for finding in cured.findings}.get(code)
    return code in [finding.code for finding in report.findings] and left in (None, "note")


def codes(report: Any) -> str:
    return ", ".join(f"{f.severity} `{f.code}`" for f in report.findings)


def before_and_after(report: Any, cured: Any) -> list[str]:
    both = [report.step] if cured is None else [report.step, cured.step]
    times = [f"{1e3 * sum(step.parts.values()):.3g} ms" for step in both]
    return [", ".join(times), ", ".join(f"{step.memory.peak / 2**20:.3g} MiB" for step in both)]


if __name__ == "__main__":
    main(sys.argv[1:])
