"""Drawings of a loss scale: pictures, and text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scale_runs import fallen_back, scale_run
from support.tables import scale_records

from lightning_amp.findings import StepRecord
from lightning_amp.reports import ScaleHistory, plot_histories, scale_chart


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
        assert [(a, b) for a, b in zip(x, y, strict=True)][:6] == [
            (0, 1024.0), (1, 1024.0), (1, 1024.0), (3, 1024.0), (4, 1024.0), (4, 512.0),
        ]  # fmt: skip
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert ("skipped: gradients overflowed (1)" in labels) == bool(steps)


def test_plot_without_a_step_has_no_axes_of_nothing() -> None:
    axes: Any = ScaleHistory().plot().axes[0]
    assert [text.get_text() for text in axes.texts] == ["no optimizer step was taken"]
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
    text = {line.partition("|")[0].strip() for line in scale_chart(history).splitlines()[:4]}
    assert written <= text <= labels
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
    marks = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert [line.get_label() for line in marks] == ["skipped: gradients overflowed (2,000)"]
    assert marks[0].get_markersize() <= 2
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
        "c: no optimizer step was taken",
        "skipped: gradients overflowed",
        "skipped: loss was not finite",
    ]
    curves = [line for line in figure.axes[0].lines if line.get_label()[:2] in ("a:", "b:")]
    colors = [line.get_color() for line in curves]
    assert len(set(colors)) == 2
    marks = {(line.get_color(), line.get_marker(), len(line.get_xdata())) for line in figure.axes[0].lines}
    assert {(colors[0], "v", 1), (colors[0], "x", 1), (colors[1], "v", 1)} <= marks
    assert list(curves[0].get_xdata())[-1] == 50


def test_a_replay_is_broken_and_dotted_in_the_colour_of_its_run() -> None:
    run = history_of({3: "gradient"}, 50)
    replay = run.replay(init_scale=64.0, growth_interval=5)
    figure: Any = plot_histories({"a": run}, replays={"a": replay})
    assert labels(figure)[-2:] == ["replayed: no undecided step overflows", "replayed: all of them do"]
    by_style = {line.get_linestyle(): line for line in figure.axes[0].lines if line.get_color() == "#0072b2"}
    assert max(by_style["--"].get_ydata()) == max(record.next_scale for record in replay.optimistic)
    assert max(by_style[":"].get_ydata()) == max(record.next_scale for record in replay.pessimistic)


def test_many_runs_repeat_colours_and_long_names_take_a_line_each() -> None:
    figure: Any = plot_histories({f"a long folder/with a long name/version_{i}": history_of({}, 5) for i in range(9)})
    assert len(labels(figure)) == 9
    figure.canvas.draw()
    width = figure.bbox.width
    assert all(text.get_window_extent().x1 <= width for text in figure.legends[0].get_texts())


def test_no_run_with_a_step() -> None:
    axes: Any = plot_histories({"a": ScaleHistory()}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no optimizer step was taken"]


def test_a_fallback_is_a_vertical_line_and_no_curve_leads_there() -> None:
    figure: Any = fallen_back().plot()
    curve, *others = figure.axes[0].lines
    x, y = curve.get_data()
    assert [a for a, b in zip(x, y, strict=True) if math.isnan(b)] == [6]
    assert [line.get_xdata()[0] for line in others if line.get_label() == "bf16 from step 6 on"] == [6]
    several: Any = plot_histories({"mine": fallen_back(), "other": scale_run("O...")})
    labels = several.axes[0].get_legend_handles_labels()[1]
    assert labels[:2] == ["mine: 7 of 16 steps skipped, bf16 from step 6 on", "other: 1 of 4 steps skipped"]


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_short_run_has_several_characters_for_each_step() -> None:
    history = scale_run("OO..L....O", init_scale=64.0, growth_interval=4)
    assert scale_chart(history, width=35).splitlines() == [
        "64 |---",
        "32 |   ---               ----------",
        "16 |      ---------------",
        "   |v  v        x              v",
        "    0  optimizer steps attempted  9",
        "skipped: v 3 steps overflowed, x 1 step had a non-finite loss",
    ]


def test_a_long_run_has_many_steps_in_a_column() -> None:
    history = scale_run("." * 300 + "OL" + "." * 298, first=1000, init_scale=64.0, growth_interval=200)
    lines = scale_chart(history, width=60).splitlines()
    assert lines[0] == "128 |                  |--------|                  ---------"  # `|`: both, in one column
    assert lines[1] == " 64 |------------------|        |------------------"
    assert lines[2].index("*") == lines[0].rindex("|")
    assert (lines[3].split()[0], lines[3].split()[-1]) == ("1,000", "1,599")
    assert all(len(line) <= 60 for line in lines[:4])


@pytest.mark.parametrize("width", [1, 30, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 10, 40])
@pytest.mark.parametrize("pattern", [".", "O", "O" * 30 + "." * 300, "." * 777])
def test_the_text_fits(pattern: str, width: int, height: int) -> None:
    history = scale_run(pattern, growth_interval=7, max_consecutive_skips=100)
    curve = [line for line in scale_chart(history, width, height).splitlines() if not line.startswith("skipped")]
    assert all(len(line) <= max(width, 30) for line in curve)
    scales = [line for line in curve if "|" in line and line.split("|")[0].strip()]
    assert 1 <= len(scales) <= max(height, 2)
    assert all(set(line.partition("|")[2]) <= set("-| ") for line in scales)
    assert all(line == line.rstrip() for line in curve)


def test_each_column_has_the_scale_of_its_steps() -> None:
    history = scale_run("O" * 8 + "." * 52, growth_interval=20)
    lines = [line for line in scale_chart(history, width=67, height=40).splitlines() if "-" in line]
    drawn = {line.split("|")[0].strip(): line.count("-") for line in lines}
    assert drawn == {
        **{f"2**{exponent}": 1 for exponent in range(11, 17)},
        "2**10": 1 + 12,
        "2**9": 1 + 20,
        "2**8": 20,
    }


def test_a_scale_of_zero_is_the_lowest_line() -> None:
    history = ScaleHistory()
    history.extend(
        StepRecord(i, 0, scale, scale / 2 if scale > 1 else 0.0, skipped=True, reason="gradient")
        for i, scale in enumerate([4.0, 2.0, 0.0])
    )
    labels = [line.partition("|")[0].strip() for line in scale_chart(history).splitlines()]
    assert labels[:3] == ["4", "2", "0"]


def test_text_without_a_step() -> None:
    assert scale_chart(ScaleHistory()) == "no optimizer step was recorded"


def test_a_fallback_is_marked_in_the_text_and_no_curve_leads_there() -> None:
    lines = scale_chart(fallen_back(12, 8), width=30).splitlines()
    assert lines[-1] == "skipped: v 13 steps overflowed; > bf16 from step 12 on"
    assert lines[-3].strip() == "|vvvvvvv vvvvv>    v"
    assert not any("|" in line.partition("|")[2][13:] for line in lines[:-3])
