"""Base classes of the tables. A table behaves like a list, prints as aligned text and can be saved as CSV."""

from __future__ import annotations

import csv
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, overload

from typing_extensions import override

from lightning_amp._arguments import require_count
from lightning_amp._files import write_atomically
from lightning_amp.findings import TOTAL

MAX_ROWS = 15
"""The largest number of rows in a picture, and by default in a text."""

_MAX_SAMPLES = 200

Row = TypeVar("Row")


class Table(Sequence[Row]):
    """Rows of a run, oldest first."""

    _header: ClassVar[Iterable[str]]

    @abstractmethod
    def __iter__(self) -> Iterator[Row]: ...

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return list(self)[index]

    def _cells(self, row: Any) -> Iterable[Any]:
        return row

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV, with a header line, to a path or a URL. The file appears whole or not at all."""

        def write(file: Any) -> None:
            writer = csv.writer(file)
            writer.writerow(self._header)
            writer.writerows(map(self._cells, self))

        write_atomically(path, write)


class SampledTable(Table[Row]):
    """A table that gets several rows in each sample. Printing the table shows the rows of the last sample."""

    _called: ClassVar[str]
    _titles: Sequence[str]
    _name_at: ClassVar[int]
    """The position of the name in a row. The fields before it are the same in all rows of a sample."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._samples: list[list[Row]] = []
        names = set[str]()
        for row in rows:
            # one step may have several samples, as `trainer.validate()` may run twice
            if not names or self._name(row) in names or self._when(row) != self._when(self._samples[-1][0]):
                self._samples.append([])
                names.clear()
            self._samples[-1].append(row)
            names.add(self._name(row))

    def _name(self, row: Any) -> str:
        return row[self._name_at]

    def _when(self, row: Any) -> tuple[Any, ...]:
        return row[: self._name_at]

    def add(self, rows: Iterable[Row]) -> None:
        """Append the rows of one sample. Of more than 200, every second one of the older half is dropped."""
        self._samples.append(list(rows))
        if len(self._samples) > _MAX_SAMPLES:
            half = _MAX_SAMPLES // 2
            self._samples = self._samples[:half:2] + self._samples[half:]

    @property
    def last(self) -> list[Row]:
        """Return the rows of the last sample, in their order."""
        return list(self._samples[-1]) if self._samples else []

    @override
    def __iter__(self) -> Iterator[Row]:
        return (row for sample in self._samples for row in sample)

    @override
    def __len__(self) -> int:
        return sum(map(len, self._samples))

    @override
    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """Write the last sample as a text table, the worst row first.

        Args:
            max_rows: The most rows to show. `None` shows all, in their order.
        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        if not self.last:
            return "no sample yet"
        rows = [row for row in (self.last if max_rows is None else self.worst_first()) if self._name(row) != TOTAL]
        shown = rows[:max_rows]
        total = [row for row in self.last if self._name(row) == TOTAL]
        text = aligned([self._titles, *map(self._written, [*shown, *total])])
        if len(shown) < len(rows):
            every = f"`print({self._called}.to_text(max_rows=None))` shows all"
            text += f"\nThese are the {len(shown)} worst of {len(rows)}; {every}."
        return text

    def worst_first(self) -> list[Row]:
        """Return the rows of the last sample, sorted."""
        return sorted(self.last, key=self._badness, reverse=True)

    @abstractmethod
    def _badness(self, row: Row) -> Any:
        """Return a key that sorts the worst row last."""

    @abstractmethod
    def _written(self, row: Row) -> Sequence[str]:
        """Write the cells of a row."""


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Align the first column left and all other columns right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip() for first, *cells in lines]
    return "\n".join(text)
