"""The page of a report is whole, escaped, and loads nothing."""

from __future__ import annotations

import functools
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest
from support.reports import HOSTILE, REPORTS, SCRIPT, make_report
from typing_extensions import override

from lightning_amp.compare import PrecisionReport, _html
from lightning_amp.compare._html import page

VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Reads elements with their attributes, and the text between them; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@functools.cache
def report_of(name: str) -> PrecisionReport:
    return REPORTS[name]()


@functools.cache
def page_of(name: str) -> str:
    return page(report_of(name).plan, report_of(name).arms)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "many" else []) for n in REPORTS])
@pytest.mark.few(5)
def test_a_page_is_whole_and_alone(name: str) -> None:
    text = page_of(name)
    read = Reader(text)
    assert '<!DOCTYPE html>\n<html lang="en">' in text
    assert len(text.encode("utf-8")) < 1_000_000
    for tag, attributes in read.elements:  # nothing is loaded, nothing runs, and every picture has a name
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "image"}
        links = [value or "" for key, value in attributes.items() if key.endswith(("href", "src", "srcset"))]
        assert all(link.startswith("#") for link in links)
        assert not any(key.startswith("on") for key in attributes)
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert not re.search(r"url\((?!#)|@import|https?:(?!//www\.w3\.org)", text)
    assert "default-src 'none'" in text
    shown = read.text.replace("`", "")
    for label, arm in report_of(name).arms.items():
        if label not in HOSTILE:
            assert label in shown
            for metric in arm.judged():
                assert arm.is_reference or f"{label}, {metric.name}: {metric.verdict}" in shown


def test_the_colours_of_the_charts_are_variables_of_the_style_sheet() -> None:
    text = page_of("usual")
    charts = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"var\(--([\w-]+)\)", charts))
    assert {"arm-0", "arm-1", "arm-2", "control", "soft", "rule", "bad"} <= used
    assert used <= set(re.findall(r"--([\w-]+):", text))
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)", charts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("usual", ["Verdicts", "Figures", "Differences to the reference, 90 % interval", "Curves", "Loss scale"]),
        ("failing", ["Verdicts", "Failed runs", "Figures", "Differences", "Curves", "Loss scale"]),
        ("no scaling", ["Verdicts", "Figures", "Differences", "Curves"]),
        ("nothing ran", ["Verdicts", "Failed runs", "Figures"]),
    ],
)
def test_sections(name: str, expected: list[str]) -> None:
    headings = re.findall(r"<h2>(.*?)</h2>", page_of(name))
    assert len(headings) == len(expected) + 1
    assert all(heading.startswith(start) for heading, start in zip(headings, [*expected, "Setup"], strict=True))
    assert page_of(name).index('<p class="lead">') < page_of(name).index("<h2>")


def test_names_are_text_and_control_characters_are_left_out() -> None:
    text = page_of("hostile")
    assert SCRIPT not in text
    assert SCRIPT in Reader(text).text
    text.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert "半精度 🔥" in text


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_a_library_it_says_what_to_do(library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib jinja2"):
        make_report(2, 1).to_html(tmp_path / "report.html")


def test_labels_of_an_axis_keep_their_digits() -> None:
    """The fault: coordinates are cut to hundredths of a pixel, and labels such as 0.0025 were cut to 0.00 as well."""
    with mpl.rc_context(_html._STYLE):
        svg = _html._svg(lambda axes: axes.set_xticks([0.0025, 0.005]), "differences")
    assert ">0.0025<" in svg
    assert not re.search(r'[ "]\d+\.\d{3}', svg)
