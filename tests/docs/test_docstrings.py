"""The docstrings: every public name has an example, and every example runs; functions begin with what they do."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.compared import here

import lightning_amp
from lightning_amp import AmpPrecision
from lightning_amp.compare import Plan, Point, Run

IN_HAND = {"fp32_region", "scaled_grad", "unscale_"} | {
    "ScaleHistory", "ComparisonTable", "GradientTable", "Overflow",
}  # fmt: skip
"""Public beside `lightning_amp.__all__`: the functions of a room, and what the callbacks hand out."""

pytestmark = [
    # Lightning's, about the model summary of every trainer in half precision.
    pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary"),
    # Ours, and true: of a CPU without bf16 instructions, on which the examples have to run, too.
    pytest.mark.filterwarnings(r"ignore:lightning_amp. precision 'bf16' found .*\n  - this device emulates [^\n]*\Z"),
]

BLOCK = re.compile(r"^( *)\.\. code-block:: python\n((?:\1 +\S.*\n|\s*\n)+)", re.MULTILINE)
FIRST_WORDS = {"What", "Whether", "Who", "Which", "How", "Why", "Where", "The", "A", "An"}

NEEDS_GPU = {"FSDPAmpPrecision": "requires a GPU accelerator"}
"""What Lightning says on the CPU; up to there the example runs."""


WHOLE_RUNS = {"LocalDevices", "compare_precisions", "doctor", "DoctorReport"}
"""Examples that take more than four seconds."""


class Example(NamedTuple):
    """A block in the docstring of `owner`; `line` is where it begins, from 0."""

    owner: str
    path: str
    line: int
    code: str


def documented(text: str) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, ast.Constant]]:
    """All classes and functions of a file that have a docstring, with it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            assert isinstance(first.value, ast.Constant)
            yield node, first.value


def examples_of(path: str, text: str) -> Iterator[Example]:
    lines = text.splitlines(keepends=True)
    for node, docstring in documented(text):
        assert docstring.end_lineno is not None
        shown = "".join(lines[docstring.lineno - 1 : docstring.end_lineno])
        for match in BLOCK.finditer(shown):
            line = docstring.lineno - 1 + shown.count("\n", 0, match.start(2))
            yield Example(node.name, path, line, textwrap.dedent(match[2]))


ROOT = Path(lightning_amp.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
EXAMPLES = [example for path, text in SOURCES.items() for example in examples_of(path, text)]


class Model(L.LightningModule):
    """What the examples train. Its loss is a sum, whose first gradients overflow fp16 at the first scale."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.body(batch))

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch).float() - batch.sum(1, keepdim=True)).square().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) / len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    batch_size = 4

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(32, 8), batch_size=self.batch_size)  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self.train_dataloader()


def run_example(example: Example) -> dict[str, Any]:
    """Run it as a user would, with a model and data; train with a `training_step` that it defines."""
    public = {name: getattr(lightning_amp, name) for name in lightning_amp.__all__}
    given = {"L": L, "torch": torch, "nn": nn, "model": Model(), "data": Data(), "Model": Model, "Data": Data}
    namespace: dict[str, Any] = {"__name__": "__main__", **public, **given}
    # The padding makes a traceback name the line in the file.
    exec(compile("\n" * example.line + example.code, ROOT / example.path, "exec"), namespace)
    if "training_step" in namespace:
        members = {"training_step": namespace["training_step"]}
        members["automatic_optimization"] = "manual_backward" not in example.code
        trainer = L.Trainer(plugins=[AmpPrecision("fp16")], max_epochs=1, logger=False, enable_checkpointing=False)
        trainer.fit(type("Example", (Model,), members)(), Data())
        assert trainer.precision_plugin.num_steps > 0
    return namespace


@pytest.fixture
def whole_runs(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `models`, arms in this process, and the report of a comparison."""
    import lightning_amp.compare._compare as compare
    import lightning_amp.tune._batch_size_run as batch_size_run

    for module in (compare, batch_size_run):
        monkeypatch.setattr(module, "run_in_process", here)
    monkeypatch.setattr(batch_size_run, "_STEADY_S", 0.0)
    monkeypatch.setitem(sys.modules, "models", sys.modules[__name__])
    runs = [Run(label, 0, curves={"val_loss": (Point(8, 1.0, 0.5),)}) for label in ("fp32", "fp16")]
    plan = Plan("models.Model", "models.Data", {"fp32": "AmpPrecision('fp32')", "fp16": "AmpPrecision('fp16')"})
    lightning_amp.PrecisionReport(plan, runs).to_json("report.json")


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize(
    "example",
    [pytest.param(e, id=e.owner, marks=[pytest.mark.slow] if e.owner in WHOLE_RUNS else []) for e in EXAMPLES],
)
def test_the_example_runs(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # a Trainer that is told nothing would take all
    if example.owner in NEEDS_GPU:
        with pytest.raises(ValueError, match=NEEDS_GPU[example.owner]):
            run_example(example)
    else:
        run_example(example)


@pytest.mark.parametrize("name", sorted({*lightning_amp.__all__, *IN_HAND} - {"__version__"}))
def test_every_public_name_has_an_example(name: str) -> None:
    assert name in {example.owner for example in EXAMPLES}


def test_no_example_is_overlooked() -> None:
    """A block that is spelled differently would silently not be run."""
    assert len(EXAMPLES) == sum(len(re.findall(r"code-block:: *py|^ *>>> ", s, re.MULTILINE)) for s in SOURCES.values())


def test_a_wrong_example_fails_and_names_its_line() -> None:
    block = ".. code-block:: python\n\n        y = 1\n\n        assert y == 2\n"
    text = f'x = 1\n\n\ndef f():\n    r"""Do it.\n\n    {block}\n    """\n'
    (example,) = examples_of("_bad.py", text)
    assert example.code == "\ny = 1\n\nassert y == 2\n\n"
    with pytest.raises(AssertionError) as caught:
        run_example(example)
    assert caught.traceback[-1].lineno + 1 == 11
    assert Path(caught.traceback[-1].path).name == "_bad.py"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """And with neither a question word nor an article."""
    functions = [
        item for text in SOURCES.values() for item in documented(text) if not isinstance(item[0], ast.ClassDef)
    ]
    words = {node.name: str(docstring.value).split(maxsplit=1)[0] for node, docstring in functions}
    assert {name: word for name, word in words.items() if word in FIRST_WORDS} == {}
