"""Slow projects with a known reason, and healthy ones: what `doctor` says of each, and what its cure gains.

python -m tests.benchmarks.doctor_projects [NAME ...]
"""

from __future__ import annotations

import sys
import time

sys.path.insert(0, "tests")


def main(names: list[str]) -> None:
    from support.slow_projects import HEALTHY, SLOW

    from lightning_amp import doctor

    for title, cases in (("slow", SLOW), ("healthy", HEALTHY)):
        for name, case in cases.items():
            if names and not any(part in name for part in names):
                continue
            start = time.perf_counter()
            try:
                report = doctor(**case.arguments())
            except Exception as error:
                print(f"{title} | {name} | {type(error).__name__}: {error}")
                continue
            elapsed = time.perf_counter() - start
            found = [f"{f.severity[0]}:{f.code}({f.share:.2f})" for f in report.findings if f.severity != "ok"]
            right = case.code in [f.code for f in report.findings] if case.code else not report.has_problems
            print(
                f"{title} | {name} | {'right' if right else 'WRONG'} | {' '.join(found)} | {elapsed:.0f} s", flush=True
            )
            for finding in report.findings:
                if finding.code == case.code or (not case.code and finding.is_problem):
                    print(f"    {finding.message}\n    -> {finding.action}", flush=True)
            if case.cured:
                cured = doctor(**case.arguments(cured=True))
                after = [f"{f.severity[0]}:{f.code}({f.share:.2f})" for f in cured.findings if f.severity != "ok"]
                assert report.step is not None
                assert cured.step is not None
                before_s, after_s = sum(report.step.parts.values()), sum(cured.step.parts.values())
                print(
                    f"    cured: {' '.join(after)}; a step {before_s * 1e3:.3g} ms -> {after_s * 1e3:.3g} ms,"
                    f" peak {report.step.memory.peak / 2**20:.3g} -> {cured.step.memory.peak / 2**20:.3g} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
