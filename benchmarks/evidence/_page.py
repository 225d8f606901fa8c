"""Write the page: one section for each machine, with one for each part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks._machine import Machine
from benchmarks.evidence._record import Record

TITLE = """\
# On a GPU

`make gpu-evidence` runs the tests and measurements that need a GPU. It runs the tests of `tests/gpu`, counts how often
the host waits for the device, and times the optimizer step. It also measures the first rows of the
[headline table](headline.md), the [claims](claims.md), `compare_precisions` and `doctor` on a character GPT, and fp8
against bf16. It writes this page from its records, `gpu.json`.
"""

REHEARSAL = """\
**A rehearsal: no figure of this section means anything.** It was made by `--tiny`, with toy sizes. It shows that the
commands run, and nothing else."""

NOT_YET = "**Not yet measured**: no GPU was available so far."


def page(records: Sequence[Record]) -> str:
    """Write the page in Markdown.

    Args:
        records: Records of any machines.

    """
    machines = sorted({record.machine for record in records}, key=lambda machine: (machine.tiny, machine))
    sections = [_section(machine, [r for r in records if r.machine == machine]) for machine in machines]
    return "\n".join([TITLE, *(line for section in sections or [[NOT_YET]] for line in section)]).rstrip() + "\n"


def _section(machine: Machine, records: Sequence[Record]) -> Iterable[str]:
    yield f"## {machine.device}"
    yield ""
    if machine.tiny:
        yield REHEARSAL
        yield ""
    yield f"With {', '.join(machine.versions)}."
    yield ""
    yield "| part | what came of it | took |"
    yield "|---|---|---|"
    for record in records:
        yield f"| {record.part} | {record.status} | {record.wall_s:.0f} s |"
    yield ""
    for record in records:
        yield from (f"### {_capitalized(record.part)}", "")
        yield f"{record.date}, commit {record.commit}: `{record.command}`"
        yield ""
        if record.reason:
            yield f"{_capitalized(record.status)}: {_escaped(record.reason)}."
            yield ""
        if record.text:
            yield record.text
            yield ""


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").rstrip(".")
