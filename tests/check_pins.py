"""Asks whether a pin of constraints.txt has a known vulnerability: `python tests/check_pins.py`, part of `make lint`.

pip-audit asks PyPI. By itself it passes where PyPI knows nothing about a pin, and fails alike for a vulnerability and
for a network that is down. Here only a vulnerability fails, and a pin that could not be audited is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PINS = Path(__file__).parents[1] / "constraints.txt"

OUT_OF_REACH = ("requests.exceptions", "ServiceError", "your network may be blocking")
"""pip-audit's messages when PyPI cannot be reached. Any other failure is a mistake of ours."""

IGNORED: dict[str, str] = {}
"""Vulnerabilities that a pin may have: an ID or alias such as a CVE number, and why it does no harm here."""


class Verdict(NamedTuple):
    """Return what to print, and whether the check fails."""

    text: str
    failed: bool


def ask(pins: Path) -> tuple[str, str]:
    """Run pip-audit; return its JSON report and its error output."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--no-deps", "--disable-pip"]
    options = ["--format", "json", "--progress-spinner", "off"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def judge(report: str, complaints: str, ignored: Mapping[str, str]) -> Verdict:
    if not report.strip():
        reason = (complaints.strip().splitlines() or ["it printed nothing"])[-1]
        offline = any(sign in complaints for sign in OUT_OF_REACH)
        return Verdict(f"The pins were NOT audited, pip-audit failed: {reason}", not offline)
    pins: list[dict[str, Any]] = json.loads(report)["dependencies"]
    audited = [pin for pin in pins if "vulns" in pin]
    if not audited:
        return Verdict(f"The pins were NOT audited: PyPI has no answer for any of {len(pins)}.", False)
    lines: list[str] = []
    used: set[str] = set()
    for pin in audited:
        for found in pin["vulns"]:
            names = {found["id"], *found.get("aliases", [])}
            used |= names & ignored.keys()
            if not names & ignored.keys():
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                lines.append(f"- {pin['name']} {pin['version']}: {', '.join(sorted(names))}, fixed in {fixed}")
    if lines:
        lines.insert(0, "Pins with known vulnerabilities. Raise them in constraints.txt, or say in `IGNORED` why not:")
    unknown = [str(pin["name"]) for pin in pins if "vulns" not in pin]
    failed = bool(lines)
    if unknown:
        lines.append(f"NOT audited, since PyPI does not know them: {', '.join(unknown)}.")
    elif unused := sorted(ignored.keys() - used):
        lines.append(f"`IGNORED` has {', '.join(unused)}, which no pin has any more: take it out.")
    lines.append(f"{len(audited)} pins audited, {len(used)} known vulnerabilities ignored.")
    return Verdict("\n".join(lines), failed)


def main() -> None:
    verdict = judge(*ask(PINS), IGNORED)
    print(verdict.text)  # noqa: T201
    sys.exit(verdict.failed)


if __name__ == "__main__":
    main()
