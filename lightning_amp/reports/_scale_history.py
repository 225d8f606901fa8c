"""Keep the history of a loss scale, compactly, and draw one or several."""

from __future__ import annotations

import csv
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, fields
from itertools import cycle
from typing import TYPE_CHECKING, Any

from typing_extensions import final, override

from lightning_amp._files import open_text
from lightning_amp._text import alike
from lightning_amp.findings import StepRecord
from lightning_amp.reports._figures import COLORS, new_figure, saved, say_empty
from lightning_amp.reports._table import Table
from lightning_amp.scaling import RecordLog, Saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE_HISTORY_FILE = "scale_history.csv"
"""The name of the file that :class:`~lightning_amp.ScaleMonitor` writes into its folder."""

_HEADER = [field.name for field in fields(StepRecord)]


@final
class ScaleHistory(Table[StepRecord]):
    """Every step of a run. Only changes of the scale and skips take memory.

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

    _header = _HEADER

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._is_open = False  # whether the last record only says how far the run is, and the next one replaces it

    # -- reading -------------------------------------------------------------------------------------------------------

    @override
    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    @override
    def __len__(self) -> int:
        return len(self._records)

    @property
    def last(self) -> StepRecord | None:
        """Return the latest step."""
        return self._records[-1] if self._records else None

    @property
    def num_attempted(self) -> int:
        """Return how many optimizer steps were tried."""
        return self._records[-1].index - self._records[0].index + 1 if self._records else 0

    @property
    def num_skipped(self) -> int:
        """Return how many optimizer steps were skipped; all of them are stored."""
        return sum(record.skipped for record in self._records)

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps were applied."""
        return self.num_attempted - self.num_skipped

    def summary(self) -> str:
        """Write one line, such as `12 of 4,000 steps skipped, 11 in the first 20; scale 2**16 -> 2**10`.

        Steps in bf16, fp8 and fp32 have no loss scale.
        """
        if not self._records:
            return "no optimizer step was recorded"
        first = self._records[0]
        text = f"{self.num_skipped:,} of {self.num_attempted:,} steps skipped"
        if self.num_skipped and self.num_attempted > 20:
            early = sum(record.skipped and record.index < first.index + 20 for record in self)
            text += f", {early:,} in the first 20"
        losses = sum(record.reason == "loss" for record in self)
        if losses:
            text += f", {losses:,} of them with a non-finite loss"
        scaled = [record for record in self if record.precision in ("fp16", "")]
        if not scaled:
            return text
        if all(record.scale == 1 and record.next_scale > 2 for record in scaled):
            return f"{text}; no step used the loss scale, which a plain `loss.backward()` does not apply"
        write = alike(scale for record in scaled for scale in (record.scale, record.next_scale))
        return f"{text}; scale {write(scaled[0].scale)} -> {write(scaled[-1].next_scale)}"

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
            last = self.last
            is_new = last is None or record.precision != last.precision
            if self._is_open and not is_new:
                self._records.pop()
            moved = last is not None and not record.scale == record.next_scale == last.next_scale
            self._is_open = not (is_new or moved or record.skipped)
            self._records.append(record)

    # -- files and checkpoints -----------------------------------------------------------------------------------------

    @override
    def _cells(self, row: StepRecord) -> tuple[Any, ...]:
        return tuple(int(cell) if isinstance(cell, bool) else cell for cell in astuple(row))

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
                if (header := next(reader, [])) != _HEADER:
                    raise ValueError(f"the header must be {_HEADER}, got {header}")
                for index, optimizer, scale, next_scale, skipped, *words in reader:
                    numbers = int(index), int(optimizer), float(scale), float(next_scale), bool(int(skipped))
                    history.extend(_records([[*numbers, *words]]))
            except (csv.Error, ValueError) as error:
                raise ValueError(
                    f"`{path}`, line {reader.line_num}, is not a row of a scale history ({error}). The file may be cut"
                    " off; the history is also in the checkpoint."
                ) from error
        return history

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, which `torch.load(weights_only=True)` accepts."""
        return {"records": [list(astuple(record)) for record in self], "is_open": self._is_open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: If an entry is missing or wrong. The history does not change then.
        """
        saved = Saved(state, "ScaleHistory")
        self._records, self._is_open = _records(saved.entries("records")), bool(saved.any("is_open"))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the scale over the steps, with a mark for each skip.

        Args:
            path: Path or URL to also save the picture to.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (`pip install matplotlib`).
        """
        return plot_histories({"loss scale": self}, path, title=f"Loss scale: {self.summary()}")


def _records(rows: Iterable[Any]) -> list[StepRecord]:
    return list(filter(None, (Saved({"records": row}, "ScaleHistory").record("records") for row in rows)))


def plot_histories(
    histories: Mapping[str, ScaleHistory], path: str | os.PathLike[str] | None = None, *, title: str = "Loss scale"
) -> Figure:
    """Draw runs into one picture. Each run and its skips have their own colour; the legend has the names of the runs.

    Args:
        histories: The steps of each run, by its name.
        path: Path or URL to also save the picture to.
        title: The title of the picture; a long one is wrapped.
    """
    figure = new_figure(8, 3.6 + 0.12 * len(histories))
    axes: Any = figure.add_subplot()
    axes.set(xlabel="optimizer steps attempted", ylabel="loss scale")
    axes.set_title(textwrap.fill(title, 90, break_on_hyphens=False), fontsize="medium")
    records = [record for history in histories.values() for record in history]
    if not records:
        say_empty(axes, ScaleHistory().summary())
        return saved(figure, path)
    for (name, history), color in zip(histories.items(), cycle(COLORS), strict=False):
        steps = [*(record.index for record in history[:1]), *(record.index + 1 for record in history)]
        scales = [*(record.scale for record in history[:1]), *(record.next_scale for record in history)]
        label = f"{name}: {history.num_skipped:,} of {history.num_attempted:,} steps skipped"
        axes.step(steps, scales, where="post", color=color, label=label)
        skipped = [record for record in history if record.skipped]
        places = [record.index for record in skipped], [record.scale for record in skipped]
        axes.plot(*places, "v", markersize=3, color=color)
    if any(record.skipped for record in records):
        axes.plot([], [], "v", color="gray", label="skipped step")
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_yscale("log", base=2)
    write = alike(scale for record in records for scale in (record.scale, record.next_scale))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: write(scale)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    figure.legend(loc="outside lower center", fontsize="small", frameon=False)
    return saved(figure, path)
