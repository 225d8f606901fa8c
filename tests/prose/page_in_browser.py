"""The page of a report in a headless Chromium: nothing scrolls sideways, is faint, or comes from elsewhere."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.reports import REPORTS

from lightning_amp.compare._html import page

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge"]
ELSEWHERE = ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
FLAGS = [
    "--headless",
    "--no-sandbox",  # containers often have no user namespaces, and the pages are our own
    "--no-first-run",
    "--disable-gpu",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-device-scale-factor=1",
    "--enable-logging=stderr",
]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

PROBE = """
<script>
"use strict";
function numbers(color) {
  const found = color.match(/[\\d.]+/g);
  return found === null ? [0, 0, 0, 0] : found.length === 3 ? [...found.map(Number), 1] : found.map(Number);
}
function over(top, bottom) {  // both as [red, green, blue, alpha]; the bottom is opaque
  return [0, 1, 2].map(i => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1);
}
function background(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(numbers(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
}
function opacity(element) {
  let product = 1;
  for (let e = element; e; e = e.parentElement) product *= Number(getComputedStyle(e).opacity);
  return product;
}
function luminance(color) {
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = color.slice(0, 3).map(v => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(element) {
  const style = getComputedStyle(element);
  const color = numbers(element instanceof SVGElement ? style.fill : style.color);
  const below = background(element);
  color[3] *= opacity(element);
  const [low, high] = [luminance(over(color, below)), luminance(below)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function look() {
  const all = [...document.querySelectorAll("body *")].filter(e => !e.matches("script, title"));
  const hasText = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const texts = all.filter(e => hasText(e) && e.getClientRects().length);
  const faint = texts.map(e => [contrast(e), e.textContent.trim().slice(0, 60)]).sort((a, b) => a[0] - b[0]);
  const outside = all.filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, svg"));
  return {
    width: innerWidth,
    scroll_width: document.scrollingElement.scrollWidth,
    outside: outside.map(e => e.tagName + " " + e.textContent.trim().slice(0, 60)),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    page_color: getComputedStyle(document.body).backgroundColor,
    faintest: faint[0],
    num_texts: texts.length,
    unlabelled: [...document.querySelectorAll("svg")].filter(e => e.getAttribute("aria-hidden") !== "true"
      && !(e.getAttribute("role") === "img" && e.getAttribute("aria-label") && e.querySelector("title"))).length,
    num_charts: document.querySelectorAll("svg[role=img]").length,
    resources: performance.getEntriesByType("resource").map(e => e.name),
    scripts: document.scripts.length - 1,
    foreign: document.querySelectorAll("img, iframe, link, object, embed, form, a, base").length,
    root_id: document.documentElement.id,
    title: document.title,
    text: document.body.innerText,
  };
}
addEventListener("load", () => parent.postMessage(JSON.stringify([location.hash.slice(1), look()]), "*"));
</script>
"""

FRAME = '<iframe src="{name}.html#{key}" style="color-scheme: {scheme}" width="{width}" height="800"></iframe>'
LISTENER = """
<script>
const found = {};
addEventListener("message", event => {
  const [key, result] = JSON.parse(event.data);
  found[key] = result;
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


class View(NamedTuple):
    """A page at a width and in a colour scheme."""

    page: str
    width: int = 1280
    scheme: str = "light"


class Browser:
    """The Chromium of this machine."""

    def __init__(self, binary: str) -> None:
        self.binary = binary

    @classmethod
    def found(cls) -> Browser:
        """Return the browser, or skip the test if there is none."""
        for name in [*NAMES, *ELSEWHERE]:
            binary = shutil.which(name)
            if binary is not None:
                return cls(binary)
        pytest.skip(f"there is no Chromium: none of {', '.join(NAMES)}")

    def look(
        self, pages: Mapping[str, str], views: Sequence[View], folder: Path
    ) -> tuple[dict[View, dict[str, Any]], str]:
        """Return the results of a probe in each page, and the messages on the browser's console.

        All views are frames of one page. The pages' own security policy would block the probe, so it is removed. That
        also removes a second protection against scripts, so this tests the escaping alone.
        """
        for name, text in pages.items():
            (folder / f"{name}.html").write_text(POLICY.sub("", text, count=1) + PROBE, encoding="utf-8")
        frames = [FRAME.format(name=v.page, key=i, scheme=v.scheme, width=v.width) for i, v in enumerate(views)]
        around = folder / "all views.html"
        around.write_text(f'<pre id="found">{{}}</pre>{LISTENER}{"".join(frames)}', encoding="utf-8")
        output, log = self._run(["--dump-dom", "--virtual-time-budget=20000"], around)
        answers = re.search(r'<pre id="found">(.*?)</pre>', output, re.DOTALL)
        assert answers is not None, log
        found = json.loads(html.unescape(answers.group(1)))
        missing = [view for i, view in enumerate(views) if str(i) not in found]
        assert not missing, f"{missing} did not answer\n{log}"
        return {view: found[str(i)] for i, view in enumerate(views)}, console(log)

    def num_printed_pages(self, page: str, folder: Path) -> int:
        """Return the number of sheets that the page prints on."""
        path, pdf = folder / "page.html", folder / "page.pdf"
        path.write_text(page, encoding="utf-8")
        _, log = self._run([f"--print-to-pdf={pdf}", "--no-pdf-header-footer"], path)
        assert pdf.is_file(), log
        return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf.read_bytes()))

    def _run(self, flags: Sequence[str], page: Path) -> tuple[str, str]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [self.binary, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
            done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        return done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def console(log: str) -> str:
    """Return the lines of a log that come from a page."""
    return "\n".join(line for line in log.splitlines() if ":CONSOLE" in line)


# -- the page ----------------------------------------------------------------------------------------------------------


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
