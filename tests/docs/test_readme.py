"""Every python block of the README and of the documentation runs as it stands, in order, in one namespace per file."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.compared import here
from support.fp8 import needs_torchao

from lightning_amp.comparison import _compare
from lightning_amp.tuning import _probe, _runs

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(document: Path) -> list[tuple[int, str]]:
    """Line number in the document, and code, of each python block."""
    text = document.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


EXECUTABLE = [document for document in DOCUMENTS if blocks_of(document)]


FILE = re.compile(r"# (\w+\.py)\n")
"""How a block begins that is a file: it is written into the current folder, and run where it has a `__main__` guard."""


def run_blocks(document: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks_of(document):
        if (name := FILE.match(code)) is not None:
            Path(name[1]).write_text(code, encoding="utf-8")
            if '__name__ == "__main__"' in code:
                runpy.run_path(name[1], run_name="__main__")
            continue
        # The padding makes a traceback name the line in the document.
        exec(compile("\n" * line + code, document, "exec"), namespace)


def test_the_readme_has_blocks() -> None:
    assert ROOT / "README.md" in EXECUTABLE
    assert len(blocks_of(ROOT / "README.md")) >= 2


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
    for module in (_compare, _runs):
        monkeypatch.setattr(module, "run_in_process", here)
    monkeypatch.setattr(_probe, "_STEADY_S", 0.0)


@pytest.mark.usefixtures("arms_in_this_process")
@pytest.mark.filterwarnings("ignore:lightning_amp. fp8 is emulated")
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
# Ours, and true: of a CPU without bf16 instructions, on which the documentation has to run, too.
@pytest.mark.filterwarnings(r"ignore:lightning_amp. precision 'bf16' found .*\n  - this device emulates [^\n]*\Z")
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[needs_torchao] if path.stem == "fp8" else []) for path in EXECUTABLE],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_blocks_run(document: Path) -> None:
    run_blocks(document)


@pytest.mark.usefixtures("in_tmp_path")
def test_a_wrong_block_fails_and_names_its_line(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        run_blocks(document)
    assert caught.traceback[-1].lineno + 1 == 10
