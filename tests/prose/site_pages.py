"""The pages of the site, without building it: nothing public is missing, and what is shown to be typed can be typed.

`make docs` builds it, with warnings as errors, and `tests/check_site.py` reads what was built.
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_amp
from lightning_amp import precision
from lightning_amp.cli._commands import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
TOCTREE = re.compile(r"^```\{toctree\}\n(?P<options>(?::.*\n)*)\n?(?P<pages>(?:\S.*\n)+)```$", re.MULTILINE)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = sorted({*lightning_amp.__all__, *precision.__all__} - {"__version__"})
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def documented() -> set[str]:
    """What the reference has an entry for, by its last name."""
    return set(re.findall(r"\.\. auto(?:class|function):: (?:[\w.]+\.)?(\w+)$", REFERENCE, re.MULTILINE))


def test_every_public_name_and_command_is_in_the_reference() -> None:
    assert set(PUBLIC) <= documented()
    for name in PUBLIC:
        assert re.search(rf"^   (?:precision\.)?{name}$", REFERENCE, re.MULTILINE), "nor in the list it begins with"
    for command in COMMANDS:
        assert f"```{{command-help}} {command}\n" in REFERENCE


def test_every_example_has_a_page() -> None:
    for name in EXAMPLES:
        page = DOCS / "gallery" / f"{name}.md"
        assert f"```{{literalinclude}} ../../examples/{name}.py\n" in page.read_text(encoding="utf-8")
        assert f"]({name}.md)" in (DOCS / "gallery" / "index.md").read_text(encoding="utf-8")


def listed() -> Iterator[Path]:
    """The pages that some list of contents has."""
    for page in PAGES:
        for found in TOCTREE.finditer(page.read_text(encoding="utf-8")):
            yield from (page.parent / f"{name}.md" for name in found["pages"].split())


def test_every_page_is_listed_once() -> None:
    """The headline page is listed as soon as it has a measured row."""
    headline = DOCS / "results" / "headline.md"
    is_measured = "**Not yet measured**" not in headline.read_text(encoding="utf-8")
    pages = [page for page in PAGES if page != headline or is_measured]
    assert sorted([DOCS / "index.md", *listed()]) == sorted([*pages, DOCS / "genindex.md"])


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """What the pages and the README show to be typed, without comments and the environment in front."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for block in SHELL.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield f"{page.relative_to(ROOT)}: {line.strip()}", words


COMMAND_LINES = dict(commands())
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def options_of(script: str) -> set[str]:
    """The options that a script of this repository takes, as its source has them."""
    text = (ROOT / script).read_text(encoding="utf-8")
    by_name = "for name, value in" in text and 'f"--{name' in text
    return set(re.findall(r'"(--[a-z][\w-]*)"', text)) | ({"--width", "--batch-size", "--steps"} if by_name else set())


def cannot_be_typed(words: list[str]) -> str:
    """Return what is wrong with a command line of this repository; empty if nothing is, or if it is another's."""
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in TARGETS]
        return f"no such target: {unknown}" if unknown else ""
    script = next((word for word in words if word.endswith(".py") and word.startswith(("examples/", "tests/"))), None)
    if script is not None:
        if not (ROOT / script).exists():
            return f"there is no {script}"
        given = {word.partition("=")[0] for word in words[words.index(script) :] if word.startswith("--")}
        return f"{script} does not take {given}" if (given := given - options_of(script)) else ""
    if words[0] == "lightning-amp" and words[1] not in {*COMMANDS, "--version", "--help", "COMMAND"}:
        return f"there is no {words[1]}"
    if words[:2] in (["python", "-m"], [".venv/bin/python", "-m"]) and words[2].startswith(("benchmarks", "tests.")):
        place = ROOT / words[2].replace(".", "/")
        return "" if place.with_suffix(".py").exists() or (place / "__main__.py").exists() else f"no module {words[2]}"
    return ""


def test_what_is_shown_can_be_typed() -> None:
    found = {line: cannot_be_typed(words) for line, words in COMMAND_LINES.items()}
    assert {line: why for line, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "line",
    ["make dmeo", "python examples/gone.py", "python examples/gan.py --precison fp16", "lightning-amp comapre",
     "python -m tests.benchmarks.gone", "python -m benchmarks.gone"],
)  # fmt: skip
def test_a_wrong_command_is_found(line: str) -> None:
    assert cannot_be_typed(line.split())


def test_there_are_commands() -> None:
    assert len(COMMAND_LINES) > 30


# -- what was built ----------------------------------------------------------------------------------------------------


def check(root: Path) -> list[str]:
    return runpy.run_path(str(ROOT / "tests" / "check_site.py"))["problems"](root)


def test_a_broken_site_is_found(tmp_path: Path) -> None:
    assert check(tmp_path) == [f"{tmp_path} has no index.html"]
    link = '<a href="gone.html">x</a><a href="#nowhere">y</a><script src="https://example.org/x.js"></script>'
    (tmp_path / "index.html").write_text(link, encoding="utf-8")
    (tmp_path / "lost.html").write_text("", encoding="utf-8")
    (tmp_path / "searchindex.js").write_text("", encoding="utf-8")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "Arm.html").write_text("<p>lightning_amp.compare._arm.Arm</p>", encoding="utf-8")
    found = "\n".join(check(tmp_path))
    for text in (
        "index.html: gone.html leads nowhere",
        "index.html: #nowhere: there is no such place",
        "index.html loads https://example.org/x.js",
        "reference/Arm.html shows the private name lightning_amp.compare._arm.Arm",
        "lightning_amp.AmpPrecision is more than two clicks away",
        "the symptom 'The loss is NaN' is more than two clicks away",
        "lost.html is more than two clicks away",
        "the search does not know lightning_amp.precision.scaled_grad",
    ):
        assert text in found
