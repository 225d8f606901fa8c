"""The picture of a loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tables import scale_records

from lightning_amp.reports import ScaleHistory
from lightning_amp.scaling import StepRecord


@pytest.mark.parametrize("steps", [0, 50])
def test_plot(tmp_path: Path, steps: int) -> None:
    history = ScaleHistory()
    history.extend(scale_records({3: "gradient", 5: "loss"}, steps))
    figure = history.plot(tmp_path / "scale.png")
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
    assert "2^{16}" in " ".join(label.get_text() for label in axes.get_yticklabels())
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    unit = int(ticks[2].replace(",", "")) - int(ticks[1].replace(",", "")) if len(ticks) > 2 else 1
    assert str(unit).strip("0") in ("1", "2", "5")


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
