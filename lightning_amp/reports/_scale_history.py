"""The history of a loss scale, compact: only what changed and what was skipped is kept."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, get_args

import torch
from typing_extensions import final, override

from lightning_amp._text import counted, exact
from lightning_amp._urls import open_to_read
from lightning_amp.findings import StepPrecision, StepReason, StepRecord, before_fallback, describe_fallbacks, fallbacks
from lightning_amp.reports._table import Table
from lightning_amp.scaling import Saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_amp.reports._scale_replay import PolicyReplay

SCALE_HISTORY_FILE = "scale_history.csv"
"""What :class:`~lightning_amp.ScaleMonitor` calls it in its folder."""

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
    """Every step of a run, of which only changes of the scale and skips take memory (35 bytes each).

    .. code-block:: python

        monitor = ScaleMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print(monitor.history.num_steps, monitor.history.num_skipped)
        print([record.index for record in monitor.history if record.skipped])
        monitor.history.to_csv("scale_history.csv")

    Iterating and indexing give the stored records: the first step, every skip, every step after which the scale moved,
    the last and the first step around a change of precision, and the last step. What lies between two of them was
    applied, at the later one's scale and in its precision. `len` counts the stored
    records, and an index is a position among them, not the index of a step.
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
        index %= count
        if self._last is not None and index == count - 1:
            return self._last
        return _record(*(column[index] for column in self._columns.values()))

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'record')}: {self.summary()})"

    @property
    def last(self) -> StepRecord | None:
        """Return the latest step."""
        return self._last

    @property
    def first(self) -> StepRecord | None:
        """Return the earliest step known: a history that was not in the checkpoint begins where the run resumed."""
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
        """Write one line, such as `12 of 4,000 steps skipped, 11 in the first 20; scale 2**16 -> 1024`.

        Of a run that fell back the scale is that before, and it goes on: `, bf16 from step 64 on`.
        """
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
        end = before_fallback(list(self))[-1]
        return f"{text}; scale {exact(first.scale)} -> {exact(end.next_scale)}{describe_fallbacks(self)}"

    @property
    def fallbacks(self) -> list[StepRecord]:
        """Return the first step of each precision but the first: where a run that was stuck went on in another."""
        return fallbacks(self)

    def before_fallback(self) -> ScaleHistory:
        """Return the part in the precision in which the run began, the only one with a loss scale."""
        if not self.fallbacks:
            return self
        part = type(self)()
        part.extend(before_fallback(list(self)))
        return part

    # -- writing -------------------------------------------------------------------------------------------------------

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
        """Read what :meth:`to_csv` wrote, from a path or a URL.

        Raises:
            ValueError: Naming file and line, if it is not such a file.
        """
        history = cls()
        with open_to_read(path, "text") as file:
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
                        0 <= record.scale < math.inf and 0 <= record.next_scale < math.inf  # torch's falls to 0
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
        """Return tensors and plain numbers, so that a checkpoint loads with `weights_only=True`."""
        columns = {name: torch.tensor(column.tolist(), dtype=_dtype(name)) for name, column in self._columns.items()}
        return {**columns, "last": None if self._last is None else list(astuple(self._last))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: If an entry is missing or wrong; the history is then as it was.
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

    # -- another policy ------------------------------------------------------------------------------------------------

    def replay(self, **policy: float) -> PolicyReplay:
        """Run another scale policy over the recorded overflows; say what it would have skipped, as far as is known.

        .. code-block:: python

            from lightning_amp.reports import ScaleHistory

            monitor = ScaleMonitor(dirpath="logs")
            L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
            replay = ScaleHistory.from_csv("logs/scale_history.csv").replay(growth_interval=4)
            print(replay.num_skipped, replay.decided_fraction)

        Each step of the replay takes the rule of :class:`~lightning_amp.DynamicLossScaler` itself. The policy that
        recorded the run gives the recorded scales again, unless something set the scale from outside: a resumed run
        with other settings, a float16 loss, which lowers `max_scale` (pass `max_scale=2**15`).

        Of a run that fell back to another precision (`AmpPrecision(fallback=...)`) the part before it is replayed.

        Args:
            policy: Arguments of :class:`~lightning_amp.DynamicLossScaler`, such as `growth_interval=500`. Those that
                are not given have their defaults there, except for `init_scale`, which is the first recorded scale.

        Raises:
            ValueError: If an argument is no part of a policy or out of its range; if there are no steps, or none with a
                loss scale; if several optimizers did not step once each in every batch, which the records must show
                since the scale moves once per batch. (A single optimizer that steps several times in a batch is not
                noticed: each of its steps counts as a batch.)

        Cost: some 50 microseconds for each step that overflows or after which the scale grows.
        """
        from lightning_amp.reports._scale_replay import replay_history

        return replay_history(self, policy)

    # -- picture -------------------------------------------------------------------------------------------------------

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw log2 of the scale over steps; skips are marked, and growth if it is not more than 100 times.

        A vertical line marks where a run that was stuck went on in another precision.

        Args:
            path: Where to save the picture too, also a URL.

        Raises:
            ModuleNotFoundError: Without matplotlib (`pip install matplotlib`).
        """
        from lightning_amp.reports._scale_plot import plot_history

        return plot_history(self, path)


def _record(
    index: int, optimizer: int, scale: float, next_scale: float, skipped: int, reason: int, precision: int
) -> StepRecord:
    reasons = _REASONS[reason], _PRECISIONS[precision]
    return StepRecord(index, optimizer, scale, next_scale, bool(skipped), *reasons)


def _dtype(column: str) -> torch.dtype:
    return {"q": torch.int64, "d": torch.float64, "b": torch.int8}[_COLUMNS[column]]
