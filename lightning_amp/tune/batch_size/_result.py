"""The results of `find_batch_size`: a batch size for each precision, and the measurements."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import final, override

from lightning_amp._files import write_atomically
from lightning_amp._plain_data import Table, null, plain
from lightning_amp._text import rounded
from lightning_amp.measure import SpeedComparison


@final
class Measurement(NamedTuple):
    """One run: its batch size, its peak memory (infinite if memory ran out), and its speed (NaN if unknown)."""

    batch_size: int
    peak_gib: float
    samples_per_s: float


@final
@dataclass(frozen=True)
class BatchSizeResult:
    """The largest batch that fits in one precision. A run with this batch size was within the limit.

    Attributes:
        batch_size: Rows of a batch on each device; 0 if `error` says why there is none.
        peak_gib: The most memory that its run held at once, in GiB; NaN with an `error`.
        samples_per_s: Speed of steady steps of that run, with data loading, on all devices together; NaN if unknown.
        lr: A learning rate to try, scaled from the module's own; `None` if `message` says why there is none.
        measured: All runs, by batch size.
        limit_gib: The memory limit, in GiB.
        message: The result in words, its limit (memory, or the number of rows), and the origin of `lr`.
        error: The reason if there is no batch size: the module's own error, or a limit below the smallest batch.

    """

    batch_size: int
    peak_gib: float
    samples_per_s: float
    lr: float | None
    measured: tuple[Measurement, ...]
    limit_gib: float
    message: str
    error: str | None = None


@final
class BatchSizes(Mapping[str, BatchSizeResult]):
    """Results by label, in the order of `precisions`. Prints as Markdown."""

    def __init__(self, results: Mapping[str, BatchSizeResult]) -> None:
        self._results = dict(results)

    @override
    def __getitem__(self, label: str) -> BatchSizeResult:
        return self._results[label]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    @override
    def __len__(self) -> int:
        return len(self._results)

    @override
    def __str__(self) -> str:
        return self.to_markdown()

    @override
    def __repr__(self) -> str:
        inside = ", ".join(f"{label!r}: {result.batch_size}" for label, result in self._results.items())
        return f"BatchSizes({inside})"

    def to_markdown(self) -> str:
        """Write a table, and under it a paragraph for each precision."""
        return "\n\n".join(map(str, self.blocks())) + "\n"

    def blocks(self) -> list[str | Table]:
        """Return the parts of :meth:`to_markdown`: a table before it is laid out, and paragraphs of Markdown."""
        rows: list[list[str]] = []
        for label, result in self._results.items():
            found = result.error is None
            rows.append(
                [
                    label,
                    f"{result.batch_size:,}" if found else "none",
                    f"{rounded(result.peak_gib)} GiB" if found else "",
                    _number(result.samples_per_s),
                    "" if result.lr is None else f"{result.lr:g}",
                ]
            )
        header = ["precision", "batch size", "peak memory", "samples/s", "learning rate to try"]
        messages = [f"**{label}**: {result.message}" for label, result in self._results.items()]
        return [Table(header, rows, ["---", *["--:"] * 4]), *self._speeds(), *messages]

    def _speeds(self) -> list[str]:
        """Write how many times as fast each precision is per sample, compared with the first precision that ran."""
        known = {label: r.samples_per_s for label, r in self._results.items() if r.samples_per_s > 0}
        first, *others = known or [""]
        if not others:
            return []
        ratios = [f"{label} {SpeedComparison.of([math.log(known[first] / known[label])])}" for label in others]
        compared = f"compared with {first}: {'; '.join(ratios)}"
        return [f"Time per sample, with each precision at its own batch size, {compared}."]

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON, with `None` for infinities and NaN."""
        return {label: _data(result) for label, result in self._results.items()}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all results as JSON to a path or a URL. The file is replaced at once or not at all."""
        text = json.dumps(self.to_data(), indent=1, allow_nan=False)
        write_atomically(path, lambda file: file.write(f"{text}\n"))


def _number(value: float) -> str:
    return rounded(value) if math.isfinite(value) else ""


def _data(result: BatchSizeResult) -> dict[str, Any]:
    data = {name: getattr(result, name) for name in BatchSizeResult.__dataclass_fields__}
    return plain({**data, "measured": [point._asdict() for point in result.measured]}, null)
