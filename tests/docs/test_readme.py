"""Every python block of the README and of the documentation runs as it stands, in order, in one namespace per file.

A block that needs what the tests do not install says so in the line before it: `<!-- needs accelerate -->` runs where
that can be imported, `<!-- not run: needs package -->` nowhere. Both are compiled everywhere.
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from support.accelerate_state import own_accelerate
from zoo.compared import here

from lightning_amp.compare import _compare
from lightning_amp.tune import _batch_size_run

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = r"<!-- (?P<never>not run: )?needs (?P<package>\w+) -->"
BLOCK = re.compile(rf"^(?:{MARKER}\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALLED = re.compile(r"^(?:dependencies|test) = \[$(.*?)^\]$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A python block, and the package without which it does not run."""

    line: int
    code: str
    package: str | None
    never: bool

    @property
    def runs(self) -> bool:
        return not self.never and (self.package is None or find_spec(self.package) is not None)


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start("code")), match["code"], match["package"], match["never"] is not None)
        for match in BLOCK.finditer(text)
    ]


EXECUTABLE = [document for document in DOCUMENTS if blocks_of(document) and document.parent.name != "howto"]
"""`test_howto.py` runs the scripts of `docs/howto`."""


FILE = re.compile(r"# (\w+\.py)\n")
"""How a block begins that is a file: it is written into the current folder, and run unless others import it."""


def run_blocks(document: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(document):
        # The padding makes a traceback name the line in the document.
        compiled = compile("\n" * block.line + block.code, document, "exec")
        if (name := FILE.match(block.code)) is not None:
            Path(name[1]).write_text(block.code, encoding="utf-8")
            if name[1] != "models.py":
                runpy.run_path(name[1], run_name="__main__")
        elif block.runs:
            exec(compiled, namespace)


def test_the_readme_and_the_page_that_it_begins_with_have_blocks() -> None:
    assert ROOT / "README.md" in EXECUTABLE
    assert len(blocks_of(ROOT / "docs" / "get_started.md")) >= 2


def test_no_block_is_overlooked() -> None:
    """A fence that is indented or spelled differently would silently not be run."""
    for document in DOCUMENTS:
        fences = re.findall(r"^\s*```\s*(?:python|py)\b", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == len(blocks_of(document)), document


@pytest.fixture
def arms_in_this_process(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains whole runs imports from the current folder and starts no processes, each of which takes seconds."""
    monkeypatch.syspath_prepend(in_tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)  # of another guide
    for module in (_compare, _batch_size_run):
        monkeypatch.setattr(module, "run_in_process", here)
    monkeypatch.setattr(_batch_size_run, "_STEADY_S", 0.0)


def marks_of(document: Path) -> list[pytest.MarkDecorator]:
    """Pages that measure take a quarter of a minute and more."""
    measures = document.stem in {"doctor", "batch_size", "decide"}
    return [pytest.mark.slow] if measures else []


@pytest.mark.usefixtures("arms_in_this_process")
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
# Ours, and true: of a CPU without bf16 instructions, on which the documentation has to run, too.
@pytest.mark.filterwarnings(r"ignore:lightning_amp. precision 'bf16' found .*\n  - this device emulates [^\n]*\Z")
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=marks_of(path)) for path in EXECUTABLE],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_blocks_run(document: Path) -> None:
    with own_accelerate():
        run_blocks(document)


def installed() -> set[str]:
    """The packages that the tests have in any case, as they are imported."""
    requirements = "".join(INSTALLED.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return {name.replace("-", "_").lower() for name in re.findall(r'^\s*"([\w-]+)', requirements, re.MULTILINE)}


def test_only_what_is_not_installed_is_a_reason_not_to_run() -> None:
    assert {"torch", "lightning", "torchmetrics", "pytest"} <= installed()
    assert not {block.package for document in DOCUMENTS for block in blocks_of(document)} & installed()


def test_no_marker_is_overlooked() -> None:
    """One with other words, or with a line between it and its block, would silently change nothing."""
    for document in DOCUMENTS:
        markers = re.findall(r"<!--[^>]*\b(?:needs?|runs?)\b", document.read_text(encoding="utf-8"))
        assert len(markers) == sum(block.package is not None for block in blocks_of(document)), document


@pytest.mark.usefixtures("in_tmp_path")
def test_a_wrong_block_fails_and_names_its_line(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        run_blocks(document)
    assert caught.traceback[-1].lineno + 1 == 10
