"""Keep the history of a loss scale, compactly."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

import torch
from typing_extensions import final, override

from lightning_amp._files import open_text
from lightning_amp._text import alike, counted
from lightning_amp.findings import StepPrecision, StepReason, StepRecord
from lightning_amp.reports._scale_drawing import plot_histories
from lightning_amp.reports._table import Table
from lightning_amp.scaling import RecordLog, Saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE_HISTORY_FILE = "scale_history.csv"
"""The name of the file that :class:`~lightning_amp.ScaleMonitor` writes into its folder."""

_REASONS: tuple[StepReason, ...] = get_args(StepReason)
_PRECISIONS: tuple[StepPrecision, ...] = get_args(StepPrecision)
_COLUMNS = {
    "index": "q",
    "optimizer_idx": "q",
    "scale": "d",
    "next_scale": "d",
    "skipped": "b",
    "reason": "b",
    "precision": "b",
}


@final
class ScaleHistory(Table[StepRecord]):
    """Every step of a run. Only changes of the scale and skips take memory, 35 bytes each.

    .. code-block:: python

        monitor = ScaleMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print(monitor.history.num_steps, monitor.history.num_skipped)
        print([record.index for record in monitor.history if record.skipped])
        monitor.history.to_csv("scale_history.csv")

    Iterating and indexing give the stored records: the first and the last step, every skip, and every step after which
    the scale moved. The two steps around a change of precision are stored, too. The steps between two records were
    applied, at the later one's scale and in its precision. `len` counts the stored records, and an index is a position
    among them, not the index of a step.
    """

    _header = _COLUMNS

    def __init__(self) -> None:
        self._columns = {name: array(code) for name, code in _COLUMNS.items()}
        self._last: StepRecord | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    @override
    def __iter__(self) -> Iterator[StepRecord]:
        yield from map(_record, *self._columns.values())
        if self._last is not None and not self._is_stored(self._last):
            yield self._last

    @override
    def __len__(self) -> int:
        return len(self._columns["index"]) + (self._last is not None and not self._is_stored(self._last))

    @override
    def _row(self, index: int) -> StepRecord:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"`history[{index}]`: there are {counted(count, 'record')}, one for each change.")
        return next(islice(self, index % count, None))

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'record')}: {self.summary()})"

    @property
    def last(self) -> StepRecord | None:
        """Return the latest step."""
        return self._last

    @property
    def first(self) -> StepRecord | None:
        """Return the earliest known step. A history that was not in the checkpoint begins where the run resumed."""
        return next(iter(self), None)

    @property
    def num_attempted(self) -> int:
        """Return how many optimizer steps were tried."""
        first = self.first
        return 0 if self._last is None or first is None else self._last.index - first.index + 1

    @property
    def num_skipped(self) -> int:
        """Return how many optimizer steps were skipped; all of them are stored."""
        return sum(self._columns["skipped"])

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps were applied."""
        return self.num_attempted - self.num_skipped

    def summary(self) -> str:
        """Write one line, such as `12 of 4,000 steps skipped, 11 in the first 20; scale 2**16 -> 2**10`."""
        if self._last is None:
            return "no optimizer step was recorded"
        first = self.first
        assert first is not None
        skipped = [r.index - first.index for r in self if r.skipped]
        text = f"{len(skipped):,} of {self.num_attempted:,} steps skipped"
        if skipped and self.num_attempted > 20:
            text += f", {sum(index < 20 for index in skipped):,} in the first 20"
        losses = sum(r.reason == "loss" for r in self)
        if losses:
            text += f", {losses:,} of them with a non-finite loss"
        write = alike(scale for record in self for scale in (record.scale, record.next_scale))
        return f"{text}; scale {write(first.scale)} -> {write(self._last.next_scale)}"

    # -- writing -------------------------------------------------------------------------------------------------------

    @classmethod
    def following(cls, log: RecordLog) -> ScaleHistory:
        """Return a history that receives all records to come: `ScaleHistory.following(amp.records)`.

        For Fabric and for a loop of your own, which have no `ScaleMonitor`. Call `amp.flush()` before you read it.
        """
        history = cls()
        log.subscribe(history.extend)
        return history

    def extend(self, records: Iterable[StepRecord]) -> None:
        """Add records in their order."""
        for record in records:
            last = self._last
            changed = last is not None and record.precision != last.precision
            if changed and last is not None and not self._is_stored(last):
                self._store(last)
            if (
                last is None
                or changed
                or record.skipped
                or record.next_scale != record.scale
                or record.scale != last.next_scale
            ):
                self._store(record)
            self._last = record

    def _store(self, record: StepRecord) -> None:
        *values, reason, precision = self._cells(record)
        values += [_REASONS.index(reason), _PRECISIONS.index(precision)]
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def _is_stored(self, record: StepRecord) -> bool:
        stored = self._columns["index"]
        return len(stored) > 0 and stored[-1] == record.index

    # -- files and checkpoints -----------------------------------------------------------------------------------------

    @override
    def _cells(self, row: StepRecord) -> tuple[Any, ...]:
        return row.index, row.optimizer_idx, row.scale, row.next_scale, int(row.skipped), row.reason, row.precision

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> ScaleHistory:
        """Read a file that :meth:`to_csv` wrote, from a path or a URL.

        Raises:
            ValueError: If it is not such a file. The message names file and line.
        """
        history = cls()
        with open_text(path) as file:
            reader = csv.reader(file)
            try:
                header, *rows = [(row, reader.line_num) for row in reader] or [([], 0)]
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(
                    f"`{path}`, after line {reader.line_num}, is not text ({error}); the history is also in the"
                    " checkpoint."
                ) from error
            columns = list(_COLUMNS)
            if header[0] != columns:
                raise ValueError(f"`{path}` is not a scale history: its header must be {columns}, got {header[0]}.")
            for row, line in rows:
                try:
                    index, optimizer, scale, next_scale, skipped, reason, precision = row
                    record = StepRecord(
                        int(index),
                        int(optimizer),
                        float(scale),
                        float(next_scale),
                        bool(int(skipped)),
                        _REASONS[_REASONS.index(reason)],  # type: ignore[arg-type]
                        _PRECISIONS[_PRECISIONS.index(precision)],  # type: ignore[arg-type]
                    )
                    if record.index <= (-1 if history.last is None else history.last.index) or not (
                        # the scale of torch's own scaler can fall to 0
                        0 <= record.scale < math.inf and 0 <= record.next_scale < math.inf
                    ):
                        raise ValueError("steps come in their order, with scales that are finite and not negative")
                except ValueError as error:
                    raise ValueError(
                        f"`{path}`, line {line}, is not a row of a scale history: {row}. The file may be cut"
                        " off; the history is also in the checkpoint."
                    ) from error
                history.extend([record])
        return history

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain numbers, which `torch.load(weights_only=True)` accepts."""
        columns = {name: torch.tensor(column.tolist(), dtype=_dtype(name)) for name, column in self._columns.items()}
        return {**columns, "last": None if self._last is None else list(astuple(self._last))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: If an entry is missing or wrong. The history does not change then.
        """
        saved = Saved(state, "ScaleHistory")
        columns: dict[str, array[Any]] = {}
        for name, code in _COLUMNS.items():
            values = saved.any(name)
            if not isinstance(values, torch.Tensor) or values.dtype != _dtype(name) or values.dim() != 1:
                raise saved.wrong(name, f"a tensor [steps] of {_dtype(name)}")
            columns[name] = array(code, values.tolist())
        if len({len(column) for column in columns.values()}) > 1:
            raise saved.wrong("index", "as long as the other columns")
        if any(not 0 <= reason < len(_REASONS) for reason in columns["reason"]):
            raise saved.wrong("reason", f"a number from 0 to {len(_REASONS) - 1} for each step")
        if any(not 0 <= precision < len(_PRECISIONS) for precision in columns["precision"]):
            raise saved.wrong("precision", f"a number from 0 to {len(_PRECISIONS) - 1} for each step")
        last = saved.record("last")
        self._columns, self._last = columns, last

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the scale over the steps, with a mark for each skip.

        Args:
            path: Path or URL to also save the picture to.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (`pip install matplotlib`).
        """
        return plot_histories({"loss scale": list(self)}, path, title=f"Loss scale: {self.summary()}")


def _record(
    index: int, optimizer: int, scale: float, next_scale: float, skipped: int, reason: int, precision: int
) -> StepRecord:
    reasons = _REASONS[reason], _PRECISIONS[precision]
    return StepRecord(index, optimizer, scale, next_scale, bool(skipped), *reasons)


def _dtype(column: str) -> torch.dtype:
    return {"q": torch.int64, "d": torch.float64, "b": torch.int8}[_COLUMNS[column]]
