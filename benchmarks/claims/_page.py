"""Write the page: a table of all claims, then one of their sources and protocols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks._machine import Machine
from benchmarks.claims._claim import Claim
from benchmarks.claims._record import Record

_BEGIN = """\
# Claims about mixed precision

`python -m benchmarks.claims` measures what articles and papers claim. The figures decide the verdict: *reproduced*,
*not reproduced*, *depends* (it holds in some cases), *undecided* (the threshold lies inside the interval), or *needs a
GPU*. All models are small: a verdict holds for the stated protocol only. Training and rounding have eight seeds, with
95 % confidence intervals of the mean. `--again --only NAME` repeats one claim. On a machine with a GPU the same command
measures what needs one."""

_REHEARSAL = "**A rehearsal (`--tiny`): its figures mean nothing.**"


def page(claims: Mapping[str, Claim], records: Sequence[Record]) -> str:
    """Write the page in Markdown; of several records of a claim on one kind of device the newest counts."""
    newest = {(record.name, record.device_type): record for record in records}
    rows = {name: [r for kind in ("cpu", "cuda") if (r := newest.get((name, kind)))] for name in claims}
    rows = {name: _shown(found) for name, found in rows.items()}
    shown = [record for found in rows.values() for record in found]
    machines = dict.fromkeys(record.machine for record in shown)
    places = len({r.device_type for r in shown}) > 1
    table = [
        f"| {claims[r.name].title} | {r.verdict} | {_cell(r.figure)} |{_where(r) if places else ''}" for r in shown
    ]
    head = ["| claim | verdict | figure |" + " where |" * places, "|---|---|---|" + "---|" * places]
    counts = ", ".join(f"{verdict} {num}" for verdict, num in Counter(r.verdict for r in shown).most_common())
    lines = [_BEGIN, "", *(_machine(machine, shown) for machine in machines), ""]
    lines += [f"Rows: {counts}.", "", *head, *table, ""] if shown else ["No claim has been run.", ""]
    lines += ["| name | source | protocol |", "|---|---|---|"]
    lines += [_protocol(name, claim, rows[name]) for name, claim in claims.items()]
    return "\n".join(lines).rstrip() + "\n"


def _shown(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records that the page shows: a GPU answers what needs one, and what is equal on both is one row."""
    measured = [record for record in records if record.verdict != "needs a GPU"] or records
    equal = len({(record.verdict, record.figure) for record in measured}) == 1
    return measured[:1] if equal else measured


def _machine(machine: Machine, records: Sequence[Record]) -> str:
    dates = sorted({record.date for record in records if record.machine == machine})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    mark = f"{_REHEARSAL} " if machine.tiny else ""
    return f"{mark}Measured {when} on {machine.device}, with {', '.join(machine.versions)}."


def _protocol(name: str, claim: Claim, records: Sequence[Record]) -> str:
    details = "".join(f" {record.details}" for record in records if record.details)
    return f"| `{name}` | {claim.source} | {_cell(claim.protocol + details)} |"


def _where(record: Record) -> str:
    return f" {'CPU' if record.device_type == 'cpu' else record.machine.device.partition(' (')[0]} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
