"""Pictures: of the loss scale, of comparisons and of gradients. They are made without pyplot, and saved."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tables import comparisons, gradient_row, hundred_gradients, many_comparisons, scale_records

from lightning_amp import GradientMonitor, MetricComparison, ScaleMonitor
from lightning_amp.reports import ComparisonRow, ComparisonTable, GradientTable, ScaleHistory, plot_histories
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
def test_pyplot_is_left_to_the_user(plot: Callable[[Path], object], tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    found = plt.get_fignums()
    plot(tmp_path / "plot.png")
    assert plt.get_fignums() == found
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_is_saved_in_the_format_of_its_name_and_returned(tmp_path: Path) -> None:
    figure = new_figure(2, 1)
    assert saved(figure, None) is saved(figure, tmp_path / "a.png") is saved(figure, tmp_path / "a.svg") is figure
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


# -- the loss scale ----------------------------------------------------------------------------------------------------


def history_of(overflows: dict[int, str], steps: int) -> ScaleHistory:
    history = ScaleHistory()
    history.extend(scale_records(overflows, steps))
    return history


@pytest.mark.parametrize("steps", [0, 50])
def test_plot_of_a_scale(tmp_path: Path, steps: int) -> None:
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
        "skipped step",
    ]
    curves = [line for line in figure.axes[0].lines if line.get_label()[:2] in ("a:", "b:")]
    colors = [line.get_color() for line in curves]
    assert len(set(colors)) == 2
    marks = {(line.get_color(), line.get_marker(), len(line.get_xdata())) for line in figure.axes[0].lines}
    assert {(colors[0], "v", 2), (colors[1], "v", 1)} <= marks
    assert list(curves[0].get_xdata())[-1] == 50


# -- comparisons -------------------------------------------------------------------------------------------------------


NAN = math.nan


def panels(figure: Any) -> list[tuple[Any, Any]]:
    """Return pairs: the panel of values, and the panel of differences."""
    return list(zip(figure.axes[::2], figure.axes[1::2], strict=True))


def heights(axis: Any) -> list[list[float]]:
    """Return the values of the lines that have a point per epoch."""
    return [list(line.get_ydata()) for line in axis.get_lines() if len(line.get_xdata()) == 3]


def test_plot_of_a_comparison(tmp_path: Path) -> None:
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


# -- gradients ---------------------------------------------------------------------------------------------------------


def shown(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize(
    ("quantity", "precision", "dangerous", "safe"),
    [
        ("headroom_bits", "fp16", [-0.5, -2.0, -20.0], [1.0, 5.0, 16.0]),
        ("sqnr_db", "bf16", [10.0, 3.0, -20.0], [30.0, 45.0, 80.0]),
    ],
)
@pytest.mark.few(1)
def test_danger_is_red_and_safety_is_pale_in_any_company(
    quantity: str, precision: str, dangerous: list[float], safe: list[float]
) -> None:
    """The colour of a value does not depend on the other values of the picture."""
    for value in (*dangerous, *safe):
        for other in (value, *dangerous, *safe):
            cells = enumerate((value, other))
            rows = [gradient_row(i, "a", precision=precision, **{quantity: v}) for i, v in cells]
            image: Any = GradientTable(rows).plot().axes[0].images[0]
            color = image.cmap(image.norm(image.get_array()))[0, 0, :3]
            saturation = max(color) - min(color)
            assert saturation > 0.4 if value in dangerous else saturation < 0.2, (value, other)


@pytest.mark.parametrize(("num_steps", "has_numbers"), [(3, True), (60, False)])
def test_a_healthy_picture_has_numbers_where_there_is_room(num_steps: int, has_numbers: bool) -> None:
    """All of its cells have the same pale colour."""
    rows = [gradient_row(i, name, sqnr_db=41.0 + i) for i in range(num_steps) for name in ("a", "b")]
    texts = [text.get_text() for text in GradientTable(rows).plot().axes[0].texts]
    assert texts == (["41", "42", "43"] * 2 if has_numbers else [])


def test_what_has_no_number_is_grey_and_an_overflow_is_the_worst() -> None:
    rows = [
        gradient_row(0, "a"),
        gradient_row(0, "zero", num_values=0, largest=0.0, headroom_bits=math.inf),
        gradient_row(0, "over", headroom_bits=-math.inf, largest=math.inf, sqnr_db=math.nan),
        gradient_row(1, "a", sqnr_db=math.inf),
    ]
    for precision in ("fp16", "bf16"):
        axes: Any = GradientTable(row._replace(precision=precision) for row in rows).plot().axes[0]
        names = [label.get_text() for label in axes.get_yticklabels()]
        values = dict(zip(names, axes.images[0].get_array(), strict=True))
        assert values["zero"].mask.all()
        assert values["over"].mask.tolist() == [False, True]
        assert values["over"][0] == axes.images[0].norm.vmin
        assert values["a"][1] == axes.images[0].norm.vmax
    assert "grey: no gradient" in axes.figure.axes[1].get_ylabel()


def test_a_picture_has_the_15_worst_rows_in_the_order_of_the_module() -> None:
    table = GradientTable([*hundred_gradients(), gradient_row(0, "(all)")])
    figure: Any = table.plot()
    names = shown(figure)
    assert len(names) == 15
    assert "layer.50" in names
    assert names == sorted(names, key=lambda name: int(name.partition(".")[2]))
    assert "the 15 worst of 100" in figure.axes[0].get_title()


def test_the_worst_of_any_step_counts_and_overflow_most_of_all() -> None:
    rows = [gradient_row(step, f"layer.{i}") for step in range(3) for i in range(30)]
    rows[30 + 17] = gradient_row(1, "layer.17", sqnr_db=math.nan)
    rows[30 + 20] = gradient_row(1, "layer.20", sqnr_db=-5.0)
    names = shown(GradientTable(rows).plot())
    assert names == [*(f"layer.{i}" for i in range(13)), "layer.17", "layer.20"]


def test_nothing_to_draw() -> None:
    figure: Any = GradientMonitor().plot()
    assert [text.get_text() for text in figure.axes[0].texts] == ["no sample yet"]
