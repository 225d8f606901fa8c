"""From a report to its charts: one for each metric, one style for each arm, the same axes side by side."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from support.reports import ARMS, REPORTS, make_report

from lightning_amp.compare._plan import Margin
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import Point
from lightning_amp.compare._statistics import Difference
from lightning_amp.compare.views._charts import (
    XY,
    Time,
    curve_charts,
    describe,
    difference_charts,
    difference_in_words,
    line_of,
    metric_names,
    scale_charts,
    scale_line,
    styles,
    thinned,
    unit_of_time,
)
from lightning_amp.compare.views._svg import CONTROL_STYLE
from lightning_amp.findings import StepRecord

NAN, INF = math.nan, math.inf


def ticks(picture: str) -> list[str]:
    return re.findall(r'<text class="tick"[^>]*>([^<]*)<', picture)


def test_each_arm_has_a_style_of_its_own_and_very_many_share_them() -> None:
    found = styles(make_report(6))
    assert list(found) == [*ARMS, "control"]
    assert list(found.values()) == [*(f"arm-{i}" for i in range(6)), CONTROL_STYLE]
    many = list(styles(make_report({str(i): ARMS["bf16"] for i in range(20)}, 1)).values())
    assert many.count("arm-0") == 1
    assert many[7:10] == ["arm-7", "arm-1", "arm-2"]


def test_the_note_on_a_metric() -> None:
    report = make_report(metrics=("val_loss", "val_acc", "depth"), margins={"val_loss": Margin(0.02)})
    assert [describe(report, name) for name in metric_names(report)] == [
        "lower is better, margin 0.02",
        "higher is better",
        "better direction unknown",
    ]


# -- differences -------------------------------------------------------------------------------------------------------


def test_the_reference_is_not_compared_with_itself() -> None:
    charts = difference_charts(make_report())
    assert [(chart.heading, len(chart.pictures)) for chart in charts] == [("val_loss", 1), ("val_acc", 1)]
    for chart in charts:
        assert re.findall(r'<g class="[^"]*"><title>(\w+): ', chart.pictures[0]) == ["bf16", "fp16", "control"]
    assert difference_charts(REPORTS["reference failed"]()) == []


def test_a_picture_says_its_numbers() -> None:
    report = make_report()
    (picture,) = difference_charts(report)[0].pictures
    words = difference_in_words(report.arms["bf16"].metrics["val_loss"])
    assert re.fullmatch(r"[+-][\de.-]+ \([+-][\de.-]+ to [+-][\de.-]+\)", words)
    assert f"bf16 {words}" in picture.partition("<title>")[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((), "-"),
        ((0.5,), "+0.5"),
        ((0.5, 0.5), "+0.5 (+0.5 to +0.5)"),
        ((NAN,), "not finite"),
        ((INF, 0.5), "not finite"),
    ],
)
def test_differences_in_words(values: tuple[float, ...], words: str) -> None:
    metric = make_report().arms["bf16"].metrics["val_loss"]
    assert difference_in_words(replace(metric, difference=Difference(values))) == words
    assert difference_in_words(replace(metric, difference=None)) == "-"


# -- curves ------------------------------------------------------------------------------------------------------------


def test_metrics_and_loss_over_steps_and_over_time() -> None:
    charts = curve_charts(make_report())
    assert [chart.heading for chart in charts] == ["val_loss", "val_acc", "Training loss"]
    for chart in charts:
        steps, time = chart.pictures
        assert "training steps" in ticks(steps)
        assert "training time, s" in ticks(time)
        assert f"{chart.heading} over training steps: fp32, bf16, fp16, control" in steps


def test_all_charts_have_the_same_x_axes() -> None:
    report = make_report(num_losses=37)
    for i, label in enumerate(("training steps", "training time, s")):
        axes = [ticks(chart.pictures[i]) for chart in curve_charts(report)]
        below = [axis[axis.index("0", 1 if axis[0] == "0" else 0) :] for axis in axes]
        assert all(axis[-1] == label for axis in below)
        assert len({tuple(axis[-4:]) for axis in below}) == 1


def test_the_reference_lies_below_the_arms_and_the_control_below_all() -> None:
    picture = curve_charts(make_report())[0].pictures[0]
    assert re.findall(r'<g class="([^"]*)"', picture) == [CONTROL_STYLE, "arm-0", "arm-1", "arm-2"] * 2


def test_long_training_is_in_minutes_or_hours() -> None:
    assert [unit_of_time(seconds).name for seconds in (12.0, 400.0, 20_000.0)] == ["s", "min", "h"]
    report = make_report(2, 1)
    (run, *_) = report.arms["fp32"].runs
    slow = {n: tuple(p._replace(train_s=p.train_s * 60) for p in c) for n, c in run.curves.items()}
    charts = curve_charts(PrecisionReport(report.plan, [replace(run, curves=slow, loss=())]))
    assert "training time, min" in ticks(charts[0].pictures[1])


def test_failed_arms_have_no_curves() -> None:
    charts = curve_charts(REPORTS["failing"]())
    assert len(charts) == 3
    assert all(": fp32, bf16, fp16, head in fp32, control<" in chart.pictures[0] for chart in charts)
    assert curve_charts(REPORTS["all failed"]()) == []


def test_one_validation_is_drawn_as_dots() -> None:
    picture = curve_charts(REPORTS["one validation"]())[0].pictures[0]
    assert picture.count('class="mean dots"') == 4
    assert 'class="mean"' not in picture


def curve(*values: float, step_s: float = 0.5) -> list[Point]:
    return [Point(10 * (i + 1), 10 * (i + 1) * step_s, value) for i, value in enumerate(values)]


def test_one_seed_is_its_own_mean() -> None:
    line = line_of("fp16", "arm-1", [curve(3.0, 2.0)])
    assert line.seeds == []
    assert line.mean == [(10, 3.0), (20, 2.0)]


def test_the_mean_over_steps_and_over_time() -> None:
    curves = [curve(3.0, 2.0), curve(5.0, 3.0, step_s=1.5)]
    assert line_of("", "", curves).mean == [(10, 4.0), (20, 2.5)]
    assert line_of("", "", curves, time=Time("min", 60.0)).mean == [(10 / 60, 4.0), (20 / 60, 2.5)]
    assert line_of("", "", curves, time=Time("s", 1.0)).seeds[1] == [(15.0, 5.0), (30.0, 3.0)]
    assert line_of("", "", [curve(1.5e308), curve(1.5e308)]).mean[0].y == 1.5e308  # their sum overflows


def test_the_mean_is_of_steps_that_all_seeds_have() -> None:
    assert line_of("", "", [curve(3.0, 2.0, 1.0), curve(5.0, 3.0)]).mean == [(10, 4.0), (20, 2.5)]
    assert line_of("", "", [curve(3.0), []]).mean == []


def test_a_curve_that_stays_not_finite_ends_with_a_cross() -> None:
    line = line_of("", "", [curve(3.0, NAN, NAN), curve(5.0, 3.0, 1.0)])
    assert math.isnan(line.mean[1].y)
    assert line.marks == [(10, 3.0)]
    assert line_of("", "", [curve(1.0, INF)]).marks == [(10, 1.0)]
    assert line_of("", "", [curve(3.0, NAN, 2.0)]).marks == line_of("", "", [curve(NAN, NAN)]).marks == []


def test_thinning_keeps_peaks_gaps_and_ends() -> None:
    rng = random.Random(0)
    points = [XY(x, rng.random()) for x in range(5000)]
    points[1234] = XY(1234, 99.0)
    points[2345] = XY(2345, -99.0)
    points[3456] = XY(3456, NAN)
    kept = thinned(points, 100)
    assert 80 <= len(kept) <= 101
    assert {points[0], points[1234], points[2345], points[-1]} <= set(kept)
    assert sum(math.isnan(p.y) for p in kept) == 1
    assert [p.x for p in kept] == sorted(p.x for p in kept)
    assert thinned(points[:100], 100) == points[:100]


# -- loss scale --------------------------------------------------------------------------------------------------------


def test_only_scaled_arms_have_a_scale() -> None:
    (chart,) = scale_charts(make_report())
    assert chart.heading == "fp16"
    assert re.fullmatch(r"\d+ of 12,000 steps skipped, 3 seeds together", chart.note)
    assert "2**15" in ticks(chart.pictures[0])
    assert 'class="cross"' in chart.pictures[0]
    assert scale_charts(REPORTS["no scaling"]()) == []


def test_the_scales_of_two_arms_have_the_same_axes() -> None:
    first, second = scale_charts(make_report(4))
    assert (first.heading, second.heading) == ("fp16", "fp16, head in fp32")
    assert ticks(first.pictures[0]) == ticks(second.pictures[0])


def record(index: int, scale: float, next_scale: float, skipped: bool = False) -> StepRecord:
    return StepRecord(index, 0, scale, next_scale, skipped, "gradient" if skipped else "none")


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [record(0, 8.0, 4.0, True), record(9, 4.0, 8.0), record(19, 8.0, 8.0)],
            [(0, 3.0), (1, 3.0), (1, 2.0), (10, 2.0), (10, 3.0), (20, 3.0)],
        ),
        ([record(0, 8.0, 8.0), record(5, 2.0, 2.0)], [(0, 3.0), (1, 3.0), (1, 1.0), (6, 1.0)]),  # set by the user
    ],
)
def test_the_scale_goes_in_steps(records: list[StepRecord], expected: list[tuple[float, float]]) -> None:
    line = scale_line("fp16", "arm-1", [records])
    assert line.mean == expected
    assert line.marks == [(1, 3.0)] * records[0].skipped
    two = scale_line("fp16", "arm-1", [records, records])
    assert (two.seeds, two.mean) == ([expected, expected], [])


def test_a_scale_of_zero_is_a_gap() -> None:
    line = scale_line("", "", [[record(0, 2.0**-149, 0.0, True), record(1, 0.0, 0.0, True)]])
    assert line.mean[1].y == -149
    assert math.isnan(line.mean[-1].y)


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "many" else []) for n in REPORTS])
def test_any_report_can_be_drawn(name: str) -> None:
    report = REPORTS[name]()
    drawn: list[Any] = [*difference_charts(report), *curve_charts(report), *scale_charts(report)]
    pictures = [picture for chart in drawn for picture in chart.pictures]
    for picture in pictures:
        assert picture.startswith("<svg ")
        assert "nan" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", picture)
    if name == "many":  # points are thinned out
        assert 300_000 < sum(map(len, pictures)) < 800_000
