"""The page of a report is whole, escaped, and loads nothing; its sections are in order."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.reports import HOSTILE, REPORTS, SCRIPT, judged, make_report
from typing_extensions import override

from lightning_amp.compare import views
from lightning_amp.compare._report import PrecisionReport

VOID = {"meta", "input", "br"}
SELF_CLOSING = {"path", "rect", "circle"}


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
        assert tag in SELF_CLOSING
        self.elements.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if "style" not in self.open and not {"title", "text"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def render(report: PrecisionReport) -> str:
    return views.page(judged(report))


@functools.cache
def report_of(name: str) -> PrecisionReport:
    return REPORTS[name]()


@functools.cache
def page_of(name: str) -> str:
    return render(report_of(name))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "many" else []) for n in REPORTS])
def test_a_page_is_whole_and_alone(name: str) -> None:
    page = page_of(name)
    read = Reader(page)
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert len(page.encode("utf-8")) < 1_000_000
    assert [tag for tag, _ in read.elements if re.fullmatch(r"h\d", tag)][:2] == ["h1", "h2"]
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in read.elements:  # nothing is loaded, nothing runs, and every picture has a name
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "use", "image"}
        assert not any(name in {"src", "href", "style", "srcset"} or name.startswith("on") for name in attributes)
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert not re.search(r"url\(|@import|https?:", page)
    assert "default-src 'none'" in page
    text = read.text.replace("`", "")
    for label, arm in report_of(name).arms.items():
        if label not in HOSTILE:
            assert label in text
        for metric in arm.metrics.values():
            if not (arm.is_reference or arm.is_control or label in HOSTILE) and arm.finished:
                assert f"{label} {metric.verdict}" in text


def test_the_same_report_is_the_same_page() -> None:
    assert render(make_report()) == page_of("usual")


# -- content -----------------------------------------------------------------------------------------------------------


def test_verdicts_come_first_and_then_the_figures() -> None:
    page = page_of("usual")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Verdicts",
        "Figures",
        "Differences to <bdi>fp32</bdi>",
        "Curves",
        "Rounding in evaluation",
        "Loss scale",
        "Setup",
    ]
    assert page.index('<p class="lead">Use <code>fp16</code>') < page.index("<h2>")
    lead, rest = re.findall(r'<p class="(?:lead|rest)">(.*?)</p>', page)
    assert lead.endswith("within the margins.")
    assert rest.endswith("would change that.")


def marks(page: str) -> list[tuple[str, str, str]]:
    """Return class, mark and first words of each verdict."""
    start = r'<li class="(\w+)"><span class="mark" aria-hidden="true">(.)</span>\n'
    return re.findall(start + r'<div><p><bdi class="arm">.*?<strong>(.*?)<', page)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("usual", [("good", "✓", "not worse")] * 2),
        ("one seed", [("open", "?", "undecided")]),
        ("no margins", [("none", "\N{EN DASH}", "no margin")]),
        ("not finite", [("good", "✓", "not worse"), ("bad", "✕", "worse"), ("open", "?", "undecided")]),
        ("failing", [("open", "?", "undecided"), ("bad", "!", "failed"), ("good", "✓", "not worse")]),
    ],
)
def test_a_verdict_has_a_mark_that_is_no_colour(name: str, expected: list[tuple[str, str, str]]) -> None:
    assert marks(page_of(name)) == expected * 2


def test_the_control_stands_beside_the_verdicts() -> None:
    for name, count in (("usual", 2), ("one seed", 0), ("reference failed", 0)):
        assert page_of(name).count("the run-to-run noise of the reference") == count
    assert "is run-to-run noise" in page_of("usual")
    assert "is run-to-run noise" not in page_of("one seed")


def test_p_values_are_details() -> None:
    details = re.findall(r"<details><summary>details</summary>(.*?)</details>", page_of("usual"))
    assert len(details) == 4
    assert all(re.fullmatch(r"p = .* alone, .* among 4 comparisons \(Holm.*correction\)", text) for text in details)
    assert page_of("usual").count("p = ") == 4
    assert "<summary>details" not in page_of("one seed")


def test_without_a_margin_the_difference_stands_in_the_verdict() -> None:
    assert re.search(r"bf16 no margin: difference [+-]\d", Reader(page_of("no margins")).text)


def test_an_error_is_a_row_and_equal_errors_are_one() -> None:
    page = page_of("failing")
    rows = re.findall(r'<tr class="error">.*?</tr>', page, re.DOTALL)
    assert [re.findall(r"<div>(.*?)\n", row) for row in rows] == [
        ["seed 1 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
        ["seeds 0, 1, 2 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
    ]
    assert all("Traceback" in row for row in rows)


def test_a_long_error_is_short_beside_the_verdict() -> None:
    report = make_report(2, 1, failing={("bf16", 0)}, error=f"RuntimeError: {'word ' * 200}end")
    verdicts, _, figures = render(report).partition("<h2>Verdicts")[2].partition("<h2>Figures")
    assert "word ..." in verdicts
    assert "word end" not in verdicts
    assert "word end" in figures


def test_who_counted_the_memory() -> None:
    assert "Peak memory is the device's own count" in Reader(page_of("usual")).text
    assert "Peak memory is the memory of tensors" in Reader(page_of("no times")).text


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("no metrics", ["Differences", "Rounding"]),
        ("no scaling", ["Loss scale"]),
        ("all failed", ["Differences", "Curves", "Rounding", "Loss scale"]),
        ("nothing ran", ["Differences", "Curves", "Rounding", "Loss scale"]),
    ],
)
def test_an_empty_section_is_left_out(name: str, missing: list[str]) -> None:
    page = page_of(name)
    assert not [word for word in missing if f"<h2>{word}" in page]
    assert ("nothing to compare" in page) == ("Differences" in missing)


def quality_rows(report: PrecisionReport) -> list[list[str]]:
    table = re.findall(r"<table>(.*?)</table>", render(report), re.DOTALL)[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>") if "<td>" in row]


def test_time_to_quality() -> None:
    report = make_report(2, 3)
    finals = report.arms["fp32"].metrics["val_loss"].finals
    runs = [run for arm in report.arms.values() for run in arm.runs]

    def with_last(run_value: Callable[[int], float]) -> list[list[str]]:
        changed = []
        for run in runs:
            if run.label == "bf16":
                first = run.curves["val_loss"][0]._replace(value=run_value(run.seed), train_s=7.5)
                run = replace(run, curves={"val_loss": (first,)})  # noqa: PLW2901
            changed.append(run)
        return quality_rows(PrecisionReport(report.plan, changed))

    assert with_last(lambda seed: finals[seed])[1][-1] == "7.5 s"
    assert with_last(lambda seed: finals[seed] + (seed == 1))[1][-1] == "7.5 s, 2 of 3 seeds"
    assert with_last(lambda seed: finals[seed] + 1)[1][-1] == "never"


def test_rounding_and_training_add_up() -> None:
    report = make_report(2, 1)
    metric = report.arms["bf16"].metrics["val_loss"]
    page = render(report)
    section = page[page.index("<h2>Rounding") :]
    rounding, training = map(float, re.findall(r"<td>([+-][\de.-]+)</td>", section)[:2])
    assert metric.difference is not None
    assert rounding + training == pytest.approx(metric.difference.mean, abs=1e-6)


def test_an_earlier_validation_is_not_taken_for_the_last() -> None:
    report = make_report(2, 1, same_weights={"val_loss": (0.5, 0.4)})
    page = render(report)
    section = page[page.index("<h2>Rounding") :]
    assert re.findall(r"<td>(.*?)</td>", section) == ["+0.1", "reference", "+0.1", "-"]


def test_several_devices_and_versions_are_told() -> None:
    report = make_report(2, 1)
    (first,), (second,) = report.arms["fp32"].runs, report.arms["bf16"].runs
    other = replace(second, device="cpu", versions={"torch": "2.8"})
    text = Reader(render(PrecisionReport(report.plan, [first, other]))).text
    assert "NVIDIA H200 and cpu; " in text
    assert text.count("torch 2.8") == 1


def test_many_arms_share_styles_and_stay_apart_in_words() -> None:
    text = Reader(render(make_report({f"arm {i}": "AmpPrecision('bf16')" for i in range(20)}, 1))).text
    assert "arm 1 / arm 8 / arm 15" in text


# -- names that users chose --------------------------------------------------------------------------------------------


def test_names_are_text() -> None:
    page = page_of("hostile")
    assert SCRIPT not in page
    assert SCRIPT in Reader(page).text
    assert "</style>" not in page.partition("<style>")[2].partition("</head>")[0].replace("</style>", "", 1)


def test_control_characters_are_left_out() -> None:
    page = page_of("hostile")
    page.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]|\[31m", page)
    assert "半精度 🔥" in page


def test_it_is_written_to_a_file(tmp_path: Path) -> None:
    report = REPORTS["hostile"]()
    report.to_html(tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render(report)


def test_without_jinja2_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match="pip install jinja2"):
        render(make_report(2, 1))
