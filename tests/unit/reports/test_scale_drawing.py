"""Drawings of a loss scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tables import scale_records

from lightning_amp.reports import ScaleHistory, plot_histories


def history_of(overflows: dict[int, str], steps: int) -> ScaleHistory:
    history = ScaleHistory()
    history.extend(scale_records(overflows, steps))
    return history


@pytest.mark.parametrize("steps", [0, 50])
def test_plot(tmp_path: Path, steps: int) -> None:
    figure = history_of({3: "gradient", 5: "loss"}, steps).plot(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 5000
    if steps:  # flat between the changes, and a fall where one was
        x, y = figure.axes[0].lines[0].get_data()
        assert list(zip(x, y, strict=True))[:4] == [(0, 1024.0), (1, 1024.0), (4, 512.0), (6, 512.0)]
        assert figure.axes[0].lines[0].get_drawstyle() == "steps-post"


def test_plot_without_a_step_has_no_axes_of_nothing() -> None:
    axes: Any = ScaleHistory().plot().axes[0]
    assert [text.get_text() for text in axes.texts] == ["no optimizer step was recorded"]
    assert list(axes.get_xticks()) == list(axes.get_yticks()) == []


def labels(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_several_are_one_picture(tmp_path: Path) -> None:
    runs = {"a": history_of({3: "gradient", 5: "loss"}, 50), "b": history_of({7: "gradient"}, 80), "c": ScaleHistory()}
    figure: Any = plot_histories(runs, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 5000
    assert labels(figure) == [
        "a: 2 of 50 steps skipped",
        "b: 1 of 80 steps skipped",
        "c: 0 of 0 steps skipped",
        "skipped",
    ]
    curves = [line for line in figure.axes[0].lines if line.get_label()[:2] in ("a:", "b:")]
    colors = [line.get_color() for line in curves]
    assert len(set(colors)) == 2
    marks = {(line.get_color(), line.get_marker(), len(line.get_xdata())) for line in figure.axes[0].lines}
    assert {(colors[0], "v", 2), (colors[1], "v", 1)} <= marks
    assert list(curves[0].get_xdata())[-1] == 50
