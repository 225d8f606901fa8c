"""The versions that pyproject.toml, the table and the guide name are the same."""

from __future__ import annotations

import re
from pathlib import Path

from versions.specs import DEFAULT, Spec
from versions.table import Table

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TABLE = Table.read(ROOT / "docs/results/versions.md")


def lower_bound(package: str) -> str:
    found = re.search(rf'"{package}>=([\d.]+)', PYPROJECT)
    assert found, package
    return found[1]


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_suite_passed_with_all_of_them() -> None:
    assert len(TABLE.rows) >= 4
    assert not [row.closing for row in TABLE.rows if row.has_failed]


def test_the_first_row_is_the_lower_bounds() -> None:
    first = TABLE.rows[0]
    assert minor(first.torch) == lower_bound("torch")
    assert first.lightning == lower_bound("lightning")
    assert minor(first.torchmetrics) == lower_bound("torchmetrics")
    assert f'requires-python = ">={minor(first.python)}"' in PYPROJECT


def test_python_versions_that_are_claimed_lie_between_those_that_were_run() -> None:
    claimed = sorted(re.findall(r"Programming Language :: Python :: (3\.\d+)", PYPROJECT), key=_numbers)
    run = sorted((minor(row.python) for row in TABLE.rows), key=_numbers)
    assert (claimed[0], claimed[-1]) == (run[0], run[-1])


def test_the_guide_names_the_same() -> None:
    text = (ROOT / "docs/guide/versions.md").read_text(encoding="utf-8")
    cells = dict(re.findall(r"^\| (Python|torch|Lightning) \| ([\d.]+ \| [\d.]+) \|$", text, re.MULTILINE))
    first, last = TABLE.rows[0], TABLE.rows[-1]
    assert cells == {
        "Python": f"{minor(first.python)} | {max((minor(row.python) for row in TABLE.rows), key=_numbers)}",
        "torch": f"{minor(first.torch)} | {minor(last.torch)}",
        "Lightning": f"{first.lightning} | {last.lightning}",
    }


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_make_and_the_workflow_run_the_rows() -> None:
    assert len(TABLE.rows) == len(DEFAULT)
    rows = {(minor(row.python), row.torch.partition("+")[0], row.lightning) for row in TABLE.rows}
    for spec in map(Spec.parse, DEFAULT):
        named = dict(requirement.split("==") for requirement in spec.requirements)
        assert spec.lowest or (spec.python, named["torch"], named["lightning"]) in rows
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(text for text in DEFAULT if set() < {*Spec.parse(text).requirements} <= {*pins})
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert re.findall(r"^          - (\S*python==\S+)$", workflow, re.MULTILINE) == [t for t in DEFAULT if t != pinned]
