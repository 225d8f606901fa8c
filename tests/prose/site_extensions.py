"""The extensions of the site that change written pages: tables that fit a phone, and public names of types."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))

import tables


def written(body: str) -> str:
    """Return a page after `tables.py` has changed it."""
    context = {"body": body}
    tables.fit(None, "page", "page.html", context, None)
    return context["body"]


def table(*rows: tuple[str, ...]) -> str:
    head, *others = rows
    lines = ["".join(f'<th class="head"><p>{cell}</p></th>' for cell in head)]
    lines += ["".join(f"<td><p>{cell}</p></td>" for cell in row) for row in others]
    return '<table class="docutils align-default">' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("num_skipped", '<span class="pre unbroken">num_skipped</span>'),
        ("x" * 24, f'<span class="pre unbroken">{"x" * 24}</span>'),
        ("trainer.precision_plugin.scaler", '<span class="pre">trainer.<wbr>precision_plugin.<wbr>scaler</span>'),
        ("MetricComparison(every_n_epochs=...)", '<span class="pre">MetricComparison(<wbr>every_n_epochs=...)</span>'),
        (
            "L.Trainer(plugins=[AmpPrecision()])",
            '<span class="pre">L.Trainer(<wbr>plugins=<wbr>[AmpPrecision()])</span>',
        ),
        ("a_long_name_of_a_test_that_nobody_can_write", "a_<wbr>long_<wbr>name_<wbr>of_<wbr>a_<wbr>test"),
    ],
)
def test_a_name_breaks_between_its_parts(name: str, shown: str) -> None:
    assert shown in written(f'<code><span class="pre">{name}</span></code>')


def test_the_cells_of_three_columns_have_the_names_of_their_columns() -> None:
    page = written(table(("precision", "speed & memory", "why"), ("bf16", "2x", "a reason that takes a whole line")))
    assert '<table class="stacked docutils' in page
    assert '<td data-column="precision" data-beside><p>bf16' in page
    assert '<td data-column="speed &amp; memory" data-beside><p>2x' in page
    assert '<td data-column="why"><p>a reason' in page


def test_an_empty_cell_is_marked() -> None:
    assert '<td class="empty" data-column="b"' in written(table(("a", "b", "c"), ("1", "", "3")))


@pytest.mark.parametrize(("first", "stacked"), [("an argument is 0", False), ("a message " * 9, True)])
def test_two_columns_are_stacked_if_the_first_is_long(first: str, stacked: bool) -> None:
    assert ("stacked" in written(table(("report", "remedy"), (first, "add an epsilon")))) == stacked


def test_two_columns_are_stacked_if_their_names_do_not_fit() -> None:
    names = [f'<span class="pre">{name}</span>' for name in ("torch.amp.GradScaler", "transformers.Trainer")]
    assert "stacked" in written(table(("a", "b"), (names[0], names[1])))
    assert "stacked" not in written(table(("a", "b"), (names[0], "the scaler")))


def test_many_columns_are_written_small() -> None:
    page = written(table(tuple("abcdefgh"), tuple("12345678")))
    assert '<table class="stacked many docutils' in page
    assert "many" not in written(table(("a", "b", "c"), ("1", "2", "3")))


def test_numbers_do_not_break_at_their_sign() -> None:
    assert '<span class="unbroken">-1.1e-04</span>' in written(table(("a", "b", "c"), ("x", "-1.1e-04", "y")))


def test_text_output_keeps_its_columns_and_its_options() -> None:
    page = written(
        '<div class="highlight-text notranslate"><div class="highlight"><pre><span></span>'
        "metric    AMP     fp32\nUse a smaller scale.\nlightning-amp scale --plot x</pre>"
    )
    assert '<span class="columns">metric    AMP     fp32</span>' in page
    assert "\nUse a smaller scale.\n" in page
    assert '<span class="unbroken">--plot</span>' in page


def test_types_have_their_public_names() -> None:
    nodes = pytest.importorskip("docutils.nodes")
    addnodes = pytest.importorskip("sphinx.addnodes")
    import links

    private, public = "lightning_amp.compare._run.Run", "lightning_amp.compare.Run"
    link = nodes.reference("", "", nodes.Text(private), refuri=f"Run.html#{public}", reftitle=private)
    words = [nodes.Text("tuple["), link, nodes.Text(", ...] of lightning_amp.measure._speed.Ratio")]
    entry = addnodes.desc("", nodes.paragraph("", "", *words))
    outside = nodes.literal("", "", nodes.Text(private))
    document = nodes.section("", entry, outside)
    links.show_public_names(document)
    assert entry.astext() == "tuple[Run, ...] of Ratio"
    assert link["reftitle"] == public
    assert outside.astext() == private  # as in a message that a page quotes
