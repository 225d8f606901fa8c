"""The heat map of `GradientMonitor`: its rows, colours and legend."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.tables import gradient_row, hundred_gradients

from lightning_amp import GradientMonitor
from lightning_amp.reports import GradientTable


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
