"""The page of a report in a real browser: nothing scrolls sideways, nothing is faint, nothing comes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, View
from support.reports import REPORTS

from lightning_amp.compare._html import page

PHONE, DESK = 360, 1280
VIEWS = [
    *(view for name in REPORTS for view in (View(name, PHONE, "light"), View(name, DESK, "dark"))),
    View("usual", PHONE, "dark"),
    View("usual", DESK, "light"),
]


@pytest.fixture(scope="module")
def browser() -> Browser:
    return Browser.found()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    reports = {name: make() for name, make in REPORTS.items()}
    return {name: page(report.plan, report.arms) for name, report in reports.items()}


@pytest.fixture(scope="module")
def looked(
    browser: Browser, pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[View, dict[str, Any]], str]:
    return browser.look(pages, VIEWS, tmp_path_factory.mktemp("pages"))


def problems(found: dict[str, Any], view: View) -> list[str]:
    """What is wrong with a page, in words; empty for a good one."""
    checks = {
        f"scrolls sideways: {found['scroll_width']} px": found["scroll_width"] <= view.width,
        f"stands out: {found['outside']}": not found["outside"],
        f"faint text: {found['faintest']}": found["faintest"][0] >= 4.5,
        f"pictures without a name: {found['unlabelled']}": found["unlabelled"] == 0,
        f"loads {found['resources']}": not found["resources"],
        "has a script": found["scripts"] == 0,
        "has links, images, forms": found["foreign"] == 0,
        "a script ran": found["root_id"] == "",
    }
    return [text for text, is_fine in checks.items() if not is_fine]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.page}-{view.width}-{view.scheme}")
def test_a_page(looked: tuple[dict[View, dict[str, Any]], str], view: View) -> None:
    found = looked[0][view]
    assert problems(found, view) == []
    assert found["width"] == view.width
    assert found["dark"] == (view.scheme == "dark")
    assert found["title"].startswith("Precision report: ")


def test_nothing_is_on_the_console(looked: tuple[dict[View, dict[str, Any]], str]) -> None:
    assert looked[1] == ""


def test_the_schemes_differ(looked: tuple[dict[View, dict[str, Any]], str]) -> None:
    light, dark = (looked[0][View("usual", DESK, scheme)]["page_color"] for scheme in ("light", "dark"))
    assert light == "rgb(255, 255, 255)"
    assert dark != light


def test_what_is_written_is_seen(looked: tuple[dict[View, dict[str, Any]], str]) -> None:
    found = looked[0][View("usual", DESK, "dark")]
    for text in (
        "Use fp16",
        "not worse",
        "the run-to-run noise of the reference",
        "2**15",
        "NVIDIA H200",
        "max_epochs=20",
    ):
        assert text in found["text"]
    assert found["num_charts"] == 2 + 2 * 3 + 1
    assert "<script>" in looked[0][View("hostile", DESK, "dark")]["text"]


def test_the_usual_report_takes_two_sheets_of_paper(browser: Browser, pages: dict[str, str], tmp_path: Path) -> None:
    assert browser.num_printed_pages(pages["usual"], tmp_path) == 2
