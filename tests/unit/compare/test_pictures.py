"""From a report to its charts: one for each metric, one style for each arm, the same axes side by side."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from support.reports import ARMS, REPORTS, make_report

from lightning_amp.compare._plan import Margin
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._statistics import Difference
from lightning_amp.compare.views._charts import (
    curve_charts,
    describe,
    difference_charts,
    difference_in_words,
    metric_names,
    metrics_of,
    scale_charts,
    styles,
)
from lightning_amp.compare.views._svg import CONTROL_STYLE


def ticks(picture: str) -> list[str]:
    return re.findall(r'<text class="tick"[^>]*>([^<]*)<', picture)


def groups(picture: str) -> list[str]:
    return re.findall(r'<g class="([^"]*)"', picture)


def test_each_arm_has_a_style_of_its_own() -> None:
    found = styles(make_report(6))
    assert list(found) == [*ARMS, "control"]
    assert list(found.values()) == [*(f"arm-{i}" for i in range(6)), CONTROL_STYLE]


def test_with_very_many_arms_the_reference_keeps_its_style() -> None:
    found = list(styles(make_report({str(i): ARMS["bf16"] for i in range(20)}, 1)).values())
    assert found.count("arm-0") == 1
    assert found[7:10] == ["arm-7", "arm-1", "arm-2"]


def test_what_a_metric_is_said_to_be() -> None:
    report = make_report(metrics=("val_loss", "val_acc", "depth"), margins={"val_loss": Margin(0.02)})
    assert [describe(report, name) for name in metric_names(report)] == [
        "lower is better, margin 0.02",
        "higher is better",
        "no known better direction",
    ]


# -- differences -------------------------------------------------------------------------------------------------------


def test_the_reference_is_not_compared_with_itself() -> None:
    charts = difference_charts(make_report())
    assert [chart.heading for chart in charts] == ["val_loss", "val_acc"]
    assert [chart.arms for chart in charts] == [("bf16", "fp16", "control")] * 2
    assert [len(chart.pictures) for chart in charts] == [1, 1]


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
        ((math.nan,), "not finite"),
        ((math.inf, 0.5), "not finite"),
    ],
)
def test_differences_in_words(values: tuple[float, ...], words: str) -> None:
    metric = make_report().arms["bf16"].metrics["val_loss"]
    assert difference_in_words(replace(metric, difference=Difference(values))) == words
    assert difference_in_words(replace(metric, difference=None)) == "-"


def test_without_a_reference_there_is_no_difference() -> None:
    assert difference_charts(REPORTS["reference failed"]()) == []


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
    assert groups(picture) == [CONTROL_STYLE, "arm-0", "arm-1", "arm-2"] * 2


def test_long_training_is_in_minutes_or_hours() -> None:
    report = make_report(2, 1)
    (run, *_) = report.arms["fp32"].runs
    for factor, unit in ((60, "min"), (3600, "h")):
        slow = {n: tuple(p._replace(train_s=p.train_s * factor) for p in c) for n, c in run.curves.items()}
        charts = curve_charts(PrecisionReport(report.plan, [replace(run, curves=slow, loss=())]))
        assert f"training time, {unit}" in ticks(charts[0].pictures[1])


def test_failed_arms_have_no_curves() -> None:
    charts = curve_charts(REPORTS["failing"]())
    assert [chart.arms for chart in charts] == [("fp32", "bf16", "fp16, head in fp32", "control")] * 3
    assert curve_charts(REPORTS["all failed"]()) == []


def test_many_points_are_thinned_out() -> None:
    size = sum(len(picture) for chart in curve_charts(REPORTS["many"]()) for picture in chart.pictures)
    assert 300_000 < size < 800_000


# -- loss scale --------------------------------------------------------------------------------------------------------


def test_only_scaled_arms_have_a_scale() -> None:
    (chart,) = scale_charts(make_report())
    assert chart.heading == "fp16"
    assert re.fullmatch(r"\d+ of 12,000 steps skipped, 3 seeds together", chart.note)
    assert "2¹⁵" in ticks(chart.pictures[0])
    assert 'class="cross"' in chart.pictures[0]
    assert scale_charts(REPORTS["no scaling"]()) == []


def test_the_scales_of_two_arms_have_the_same_axes() -> None:
    first, second = scale_charts(make_report(4))
    assert (first.heading, second.heading) == ("fp16", "fp16, head in fp32")
    assert ticks(first.pictures[0]) == ticks(second.pictures[0])


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "many" else []) for n in REPORTS])
def test_any_report_can_be_drawn(name: str) -> None:
    report = REPORTS[name]()
    drawn: list[Any] = [*difference_charts(report), *curve_charts(report), *scale_charts(report)]
    for chart in drawn:
        for picture in chart.pictures:
            assert picture.startswith("<svg ")
            assert "nan" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", picture)
    assert all(metrics_of(report, metric) for metric in metric_names(report))
