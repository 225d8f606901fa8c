"""The curve of a loss scale in plain characters."""

from __future__ import annotations

import pytest
from support.scale_runs import fallen_back, scale_run

from lightning_amp.findings import StepRecord
from lightning_amp.reports import ScaleHistory, scale_chart


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
def test_it_fits(pattern: str, width: int, height: int) -> None:
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
        "1024": 1 + 12,
        "512": 1 + 20,
        "256": 20,
    }


def test_a_scale_of_zero_is_the_lowest_line() -> None:
    history = ScaleHistory()
    history.extend(
        StepRecord(i, 0, scale, scale / 2 if scale > 1 else 0.0, skipped=True, reason="gradient")
        for i, scale in enumerate([4.0, 2.0, 0.0])
    )
    labels = [line.partition("|")[0].strip() for line in scale_chart(history).splitlines()]
    assert labels[:3] == ["4", "2", "0"]


def test_no_step() -> None:
    assert scale_chart(ScaleHistory()) == "no optimizer step was recorded"


def test_a_fallback_is_marked_and_the_scale_does_not_lead_there() -> None:
    lines = scale_chart(fallen_back(12, 8), width=30).splitlines()
    assert lines[-1] == "skipped: v 13 steps overflowed; > bf16 from step 12 on"
    assert lines[-3].strip() == "|vvvvvvv vvvvv>    v"
    assert not any("|" in line.partition("|")[2][13:] for line in lines[:-3])
