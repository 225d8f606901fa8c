"""Pictures of a comparison: panels, legends and scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.tables import comparisons, many_comparisons

from lightning_amp.reports import ComparisonRow, ComparisonTable

NAN = math.nan


def panels(figure: Any) -> list[tuple[Any, Any]]:
    """Return pairs: the panel of values, and the panel of differences."""
    return list(zip(figure.axes[::2], figure.axes[1::2], strict=True))


def heights(axis: Any) -> list[list[float]]:
    """Return the values of the lines that have a point per epoch."""
    return [list(line.get_ydata()) for line in axis.get_lines() if len(line.get_xdata()) == 3]


def test_plot(tmp_path: Path) -> None:
    figure = comparisons().plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    loss, loss_diff = panels(figure)[0]
    _, acc_diff = panels(figure)[1]
    assert [axis.get_ylabel().replace("\n", "") for axis, _ in panels(figure)] == [
        "loss", "acc/dataloader_idx_0", "acc/dataloader_idx_1",
    ]  # fmt: skip
    assert heights(loss) == [[1.0] * 3, pytest.approx([1.0, 1.1, 1.2])]
    assert heights(loss_diff) == [pytest.approx([0.0, 0.1, 0.2])]
    assert (len(acc_diff.patches), len(loss_diff.patches)) == (0, 1)
    assert loss_diff.get_ylim() == pytest.approx((-0.24, 0.24))
    assert list(loss.get_lines()[0].get_xdata()) == [0, 10, 20]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["fp32", "amp"]
    empty: Any = ComparisonTable().plot()
    assert [text.get_text() for axis in empty.axes for text in axis.texts] == ["no comparison yet"] * 2


def test_plot_marks_what_is_not_finite_and_keeps_small_differences_readable() -> None:
    rows = [ComparisonRow.of(epoch, epoch, "m", 5.0 if epoch != 1 else NAN, 5.001) for epoch in range(3)]
    ((_, differences),) = panels(ComparisonTable(rows, tolerance=100.0).plot())
    (marks,) = [line for line in differences.get_lines() if line.get_marker() == "x"]
    assert list(marks.get_xdata()) == [1]
    assert differences.get_ylim() == pytest.approx((-0.012, 0.012))
    assert "tolerance 100" in {text.get_text() for text in differences.get_legend().get_texts()}


def test_at_most_fifteen_panels_the_worst() -> None:
    figure = many_comparisons().plot()
    assert [values.get_ylabel() for values, _ in panels(figure)] == [f"m{i}" for i in range(19, 4, -1)]
    assert "the 15 worst of 20" in figure.get_suptitle()
