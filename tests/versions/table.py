"""`docs/results/versions.md`: the versions that the suite ran with, and its results."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

HEAD = """\
# Versions

This page shows the results of the whole test suite (`make test-all`) with different versions. `make test-versions`
makes an environment for each row, runs the suite in it, and writes this page. The first row has the lower
bounds of `pyproject.toml`. It counts all but the slow tests, which ran separately, and passed. The guide lists the
[limits of older versions](../guide/versions.md).

"""


@dataclass(frozen=True)
class Row:
    """One run of the suite."""

    python: str
    torch: str
    lightning: str
    torchmetrics: str
    numpy: str
    passed: str
    skipped: str
    failed: str
    minutes: str
    date: str
    commit: str

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions that identify a row."""
        return self.python, self.torch, self.lightning

    @property
    def has_failed(self) -> bool:
        """Return whether a test failed, or none ran."""
        return self.failed != "0" or self.passed == "0"

    @property
    def closing(self) -> str:
        """Return the result in one line."""
        return (
            f"Python {self.python}, torch {self.torch}, lightning {self.lightning}: {self.passed} passed,"
            f" {self.skipped} skipped, {self.failed} failed in {self.minutes} minutes"
        )


NAMES = [field.name for field in fields(Row)]


@dataclass(frozen=True)
class Table:
    """Return the rows, oldest torch first."""

    rows: tuple[Row, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read the page, if there is one."""
        if not path.exists():
            return cls()
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
        return cls(tuple(Row(*row) for row in cells))

    def with_row(self, row: Row) -> Table:
        """Replace the row with the same versions, or insert the row in order."""
        others = [other for other in self.rows if other.versions != row.versions]
        return replace(self, rows=tuple(sorted([*others, row], key=_age)))

    def page(self) -> str:
        """Return the page, in Markdown."""
        lines = [NAMES, ["---"] * len(NAMES), *(astuple(row) for row in self.rows)]
        return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _age(row: Row) -> list[list[int]]:
    parts = (version.partition("+")[0].split(".") for version in (row.torch, row.lightning, row.python))
    return [[int(part) for part in version if part.isdigit()] for version in parts]
