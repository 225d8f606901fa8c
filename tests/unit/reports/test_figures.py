"""Figures are made without pyplot, and saved to paths and URLs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_amp import GradientMonitor, MetricComparison, ScaleMonitor
from lightning_amp.reports._figures import new_figure, saved

PLOTS = [MetricComparison().plot, GradientMonitor().plot, ScaleMonitor().plot]


@pytest.mark.parametrize("plot", PLOTS)
def test_without_matplotlib_all_pictures_say_the_same(
    plot: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"^Plotting needs matplotlib, .* Run `pip install matplotlib`\.$"):
        plot()


@pytest.mark.parametrize("plot", PLOTS)
def test_pyplot_is_left_to_the_user(plot: Callable[[], object]) -> None:
    import matplotlib.pyplot as plt

    found = plt.get_fignums()
    plot()
    assert plt.get_fignums() == found


def test_a_figure_is_saved_in_the_format_of_its_name_and_returned(tmp_path: Path) -> None:
    figure = new_figure(2, 1)
    assert saved(figure, None) is saved(figure, tmp_path / "a.png") is saved(figure, tmp_path / "a.svg") is figure
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
