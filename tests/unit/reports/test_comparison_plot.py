"""Pictures of a comparison: panels, legends and scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.tables import comparisons, many_comparisons

from lightning_amp.reports import ComparisonRow, ComparisonTable

NAN, INF = math.nan, math.inf


def panels(figure: Any) -> list[tuple[Any, Any]]:
    """Return pairs: the panel of values, and the panel of differences."""
    return list(zip(figure.axes[::2], figure.axes[1::2], strict=True))


def heights(axis: Any) -> list[list[float]]:
    """Return the values of the lines that have a point per epoch."""
    return [list(line.get_ydata()) for line in axis.get_lines() if len(line.get_xdata()) == 3]


def test_plot(tmp_path: Path) -> None:
    figure = comparisons().plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    (loss, loss_diff), (acc, acc_diff) = panels(figure)
    assert [axis.get_ylabel() for axis in (loss, acc)] == ["loss", "acc"]
    assert heights(loss) == [[1.0] * 3, pytest.approx([1.0, 1.1, 1.2])]
    assert heights(loss_diff) == [pytest.approx([0.0, 0.1, 0.2])]
    assert len(heights(acc)) == 4  # two loaders
    assert len(heights(acc_diff)) == 2
    assert (len(acc_diff.patches), len(loss_diff.patches)) == (0, 1)
    assert loss_diff.get_ylim() == pytest.approx((-0.24, 0.24))
    empty: Any = ComparisonTable().plot()
    assert [text.get_text() for axis in empty.axes for text in axis.texts] == ["no comparison yet"] * 2


def looks(line: Any) -> tuple[Any, ...]:
    return (
        line.get_label(), line.get_color(), line.get_linestyle(), line.get_linewidth(), line.get_marker(),
        line.get_alpha(),
    )  # fmt: skip


@pytest.mark.parametrize("epochs", [1, 3, 80])
def test_the_legend_of_each_panel_shows_its_lines_as_they_are_drawn(epochs: int) -> None:
    rows = [
        ComparisonRow.of(epoch, epoch, metric, NAN if epoch == 2 else 1.0, 1.0)
        for epoch in range(epochs)
        for metric in ("acc/dataloader_idx_0", "acc/dataloader_idx_1", "loss")
    ]
    figure: Any = ComparisonTable(rows).plot()
    for axis in figure.axes:
        assert axis.get_lines()
        drawn = [looks(line) for line in axis.get_lines() if not line.get_label().startswith("_")]
        assert [looks(line) for line in axis.get_legend().get_lines()] == drawn
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[:4] == ["fp32, loader 0", "AMP, loader 0", "fp32, loader 1", "AMP, loader 1"]
    assert [text.get_text() for text in figure.axes[2].get_legend().get_texts()][:2] == ["fp32", "AMP"]


def test_plot_of_one_epoch_and_of_several_validations_in_one() -> None:
    ((sizes, _),) = panels(ComparisonTable([ComparisonRow.of(3, 40, "m", 1.0, 1.0)]).plot())
    assert sizes.get_xlabel() == "epoch"
    rows = [ComparisonRow.of(step // 20, step, "m", 1.0, 1.0) for step in (0, 10, 20)]
    ((sizes, _),) = panels(ComparisonTable(rows).plot())
    assert sizes.get_xlabel() == "step"
    assert list(sizes.get_lines()[0].get_xdata()) == [0, 10, 20]


def test_plot_marks_what_is_not_finite_and_keeps_small_differences_readable() -> None:
    rows = [ComparisonRow.of(epoch, epoch, "m", 5.0 if epoch != 1 else NAN, 5.001) for epoch in range(3)]
    ((_, differences),) = panels(ComparisonTable(rows, tolerance=100.0).plot())
    (marks,) = [line for line in differences.get_lines() if line.get_marker() == "x"]
    assert list(marks.get_xdata()) == [1]
    assert differences.get_ylim() == pytest.approx((-0.0012, 0.0012))
    assert "tolerance 100" in {text.get_text() for text in differences.get_legend().get_texts()}


def test_at_most_fifteen_panels_the_worst() -> None:
    figure = many_comparisons().plot()
    assert [values.get_ylabel() for values, _ in panels(figure)] == [f"m{i}" for i in range(19, 4, -1)]
    assert "the 15 worst of 20" in figure.get_suptitle()
    assert len(panels(many_comparisons().plot(max_rows=None))) == 20
