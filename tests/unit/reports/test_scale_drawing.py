"""Drawings of a loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tables import scale_records

from lightning_amp.findings import StepRecord
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


@pytest.mark.parametrize("steps", [1, 500, 12_345])
def test_plot_of_a_constant_scale_has_powers_of_two_and_round_steps(steps: int) -> None:
    history = ScaleHistory()
    history.extend(StepRecord(i, 0, 2.0**16, 2.0**16, skipped=False, reason="none") for i in range(steps))
    axes: Any = history.plot().axes[0]
    axes.figure.canvas.draw()
    assert "2**16" in [label.get_text() for label in axes.get_yticklabels()]
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    unit = int(ticks[2].replace(",", "")) - int(ticks[1].replace(",", "")) if len(ticks) > 2 else 1
    assert str(unit).strip("0") in ("1", "2", "5")


@pytest.mark.parametrize(
    ("first", "written"), [(4.0, {"4", "0.5"}), (1024.0, {"1024", "128"}), (2.0**12, {"2**12", "2**9"})]
)
def test_a_plot_writes_its_powers_of_two_in_one_way(first: float, written: set[str]) -> None:
    history = ScaleHistory()
    history.extend(scale_records(dict.fromkeys(range(3), "gradient"), 5, scale=first))
    axes: Any = history.plot().axes[0]
    axes.figure.canvas.draw()
    labels = {label.get_text() for label in axes.get_yticklabels()}
    assert written <= labels
    assert len({label.startswith("2**") for label in labels}) == 1
    assert written == set(axes.get_title().partition("; scale ")[2].split(" -> "))


def test_plot_of_thousands_of_skips_keeps_the_line_in_sight() -> None:
    def records() -> Iterator[StepRecord]:
        scale = 2.0**16
        for i in range(4000):
            new = scale / 2 if i % 2 else scale * 2
            yield StepRecord(i, 0, scale, new, skipped=bool(i % 2), reason="gradient" if i % 2 else "none")
            scale = new

    history = ScaleHistory()
    history.extend(records())
    figure: Any = history.plot()
    marks = [line for line in figure.axes[0].lines if line.get_marker() != "None" and len(line.get_xdata())]
    assert [len(line.get_xdata()) for line in marks] == [2000]
    assert marks[0].get_markersize() <= 3
    assert all(len(line) <= 90 for line in figure.axes[0].get_title().splitlines())


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


def test_many_runs_repeat_colours_and_long_names_take_a_line_each() -> None:
    figure: Any = plot_histories({f"a long folder/with a long name/version_{i}": history_of({}, 5) for i in range(9)})
    assert len(labels(figure)) == 9 + 1
    figure.canvas.draw()
    width = figure.bbox.width
    assert all(text.get_window_extent().x1 <= width for text in figure.legends[0].get_texts())


def test_no_run_with_a_step() -> None:
    axes: Any = plot_histories({"a": ScaleHistory()}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no optimizer step was recorded"]
