"""What `GradientMonitor` measured: rows for people, a heat map, and the scale that follows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from lightning_amp.numerics import limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTAL = "(all)"
MAX_SAMPLES = 200

Quantity = Literal["headroom_bits", "underflow_fraction", "subnormal_fraction", "sqnr_db", "cosine"]
_LABELS: dict[Quantity, str] = {
    "headroom_bits": "headroom in fp16 [bits]",
    "underflow_fraction": "share of gradients that become zero in fp16",
    "subnormal_fraction": "share of gradients that become subnormal in fp16",
    "sqnr_db": "gradient SQNR against fp32 [dB]",
    "cosine": "cosine with the fp32 gradient",
}


class GradientRow(NamedTuple):
    """One module, or parameter, at one step.

    Attributes:
        step: `trainer.global_step` before the sampled step.
        name: Qualified name; `"(all)"` for all gradients together.
        scale: The loss scale that the shares and the headroom are meant for.
        num_values: How many gradients are not zero.
        underflow_fraction: Share of these that becomes zero in fp16.
        subnormal_fraction: Share of these that loses bits.
        headroom_bits: How often the scale could be doubled before the largest leaves fp16.
        sqnr_db: Of the mixed-precision gradient against fp32; NaN if it overflowed.
        cosine: Between the two; NaN if it overflowed.
        largest: Largest magnitude, unscaled.

    """

    step: int
    name: str
    scale: float
    num_values: int
    underflow_fraction: float
    subnormal_fraction: float
    headroom_bits: float
    sqnr_db: float
    cosine: float
    largest: float


class GradientTable(Sequence[GradientRow]):
    """All rows, oldest first. Prints the latest sample, the least headroom first.

    Of more than 200 samples every second one of the older half is forgotten.
    """

    def __init__(self, rows: Iterable[GradientRow] = ()) -> None:
        self._samples: list[list[GradientRow]] = []
        for row in rows:
            if not self._samples or self._samples[-1][0].step != row.step:
                self._samples.append([])
            self._samples[-1].append(row)

    def add(self, sample: list[GradientRow]) -> None:
        """Append the rows of one step."""
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            self._samples = self._samples[:half:2] + self._samples[half:]

    @property
    def last(self) -> list[GradientRow]:
        """The rows of the latest step."""
        return list(self._samples[-1]) if self._samples else []

    def __iter__(self) -> Iterator[GradientRow]:
        return (row for sample in self._samples for row in sample)

    def __len__(self) -> int:
        return sum(len(sample) for sample in self._samples)

    @overload
    def __getitem__(self, index: int) -> GradientRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[GradientRow]: ...
    def __getitem__(self, index: int | slice) -> GradientRow | list[GradientRow]:
        return list(self)[index]

    def __str__(self) -> str:
        header = ("name", "to zero", "subnormal", "headroom", "SQNR", "cosine")
        rows = sorted(self.last, key=lambda row: (row.name == TOTAL, row.headroom_bits))
        cells = [header, *(_cells(row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    def plot(self, quantity: Quantity, path: str | os.PathLike[str] | None) -> Figure:
        """See `GradientMonitor.plot`."""
        if quantity not in _LABELS:
            raise ValueError(f"`quantity` must be one of {list(_LABELS)}, got {quantity!r}.")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Plotting needs matplotlib, which is not installed. Run `pip install matplotlib`."
            ) from error
        names = list(dict.fromkeys(row.name for row in self if row.name != TOTAL))
        steps = [sample[0].step for sample in self._samples]
        grid = [[math.nan] * len(steps) for _ in names]
        for column, sample in enumerate(self._samples):
            for row in sample:
                value = getattr(row, quantity)
                if row.name != TOTAL and math.isfinite(value):
                    grid[names.index(row.name)][column] = value
        figure = Figure(figsize=(8, 1.5 + 0.25 * max(len(names), 4)), layout="constrained")
        axes: Any = figure.add_subplot()  # no pyplot: its global state is the user's
        if names:
            colors = "viridis_r" if quantity.endswith("fraction") else "viridis"
            image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=colors)
            figure.colorbar(image, ax=axes, label=_LABELS[quantity])
            axes.set_yticks(range(len(names)), names, fontsize="small")
            every = max(1, len(steps) // 10)
            axes.set_xticks(range(0, len(steps), every), steps[::every])
        axes.set_xlabel("step")
        axes.set_title(_LABELS[quantity], fontsize="medium")
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _cells(row: GradientRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.underflow_fraction:.1%}",
        f"{row.subnormal_fraction:.1%}",
        f"{row.headroom_bits:.1f} bits",
        f"{row.sqnr_db:.1f} dB",
        f"{row.cosine:.4f}",
    )


def fitting_scale(largest: float, spare_bits: float = 2.0, lowest: int = -14) -> float:
    """The largest power of two that keeps `largest` inside fp16, with some bits to spare.

    Args:
        largest: Magnitude of the largest true gradient.
        spare_bits: For batches with larger ones.
        lowest: Exponent of the lowest scale to return. The highest is that of `DynamicLossScaler`, 2**24.

    """
    if not largest > 0:
        return 2.0**24
    exponent = math.floor(math.log2(limits("fp16").largest) - math.log2(largest) - spare_bits)
    return 2.0 ** min(max(exponent, lowest), 24)
