"""The shape of the package: who may import whom, what is public, and that private names stay in `_compat.py`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision

import lightning_amp

ROOT = Path(lightning_amp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = {"numerics": -1, "scaling": 0, "precision": 1, "callbacks": 2, "comparison": 3, "cli": 3, "__main__": 3}
"""A file may import from its own layer's folder and from lower layers only."""

TORCH_ONLY = {"numerics", "scaling"}

UPSTREAM_PRIVATE = {
    name
    for owner in (torch.amp.GradScaler("cpu"), MixedPrecision, Callback, LightningModule)
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
}


NAMEDTUPLE = {"_replace", "_asdict", "_fields", "_make"}  # public, in spite of their names


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "lightning_amp" else ""


def wrong_imports(source: str, layer: str) -> list[str]:
    wrong: list[str] = []
    for line, name in imported(ast.parse(source)):
        top, target = name.split(".")[0], layer_of(name)
        if layer in TORCH_ONLY and top in {"lightning", "pytorch_lightning", "torchmetrics"}:
            wrong.append(f"line {line}: {layer}/ imports {name}")
        if layer in LAYERS and target in LAYERS and target != layer and LAYERS[target] >= LAYERS[layer]:
            wrong.append(f"line {line}: {layer}/ imports {name} from above or beside")
        if top == "pytorch_lightning":
            wrong.append(f"line {line}: {name} is the other package")
    return wrong


def own_private_names() -> set[str]:
    names: set[str] = set()
    for file in FILES:
        if "_compat" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return names - UPSTREAM_PRIVATE


def private_uses(source: str, own: set[str]) -> list[str]:
    tree, wrong = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
            if name.startswith("_") and not name.startswith("__") and name not in own | NAMEDTUPLE | {"_compat"}:
                wrong.append(f"line {node.lineno}: .{name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in UPSTREAM_PRIVATE:
            wrong.append(f"line {node.lineno}: {node.value!r}")
    for line, name in imported(tree):
        parts = name.split(".")
        if parts[0] != "lightning_amp" and any(p.startswith("_") and p != "__future__" for p in parts):
            wrong.append(f"line {line}: {name}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    relative = file.relative_to(ROOT)
    assert wrong_imports(file.read_text(), relative.parts[0].removesuffix(".py")) == []


@pytest.mark.parametrize(
    ("source", "layer"),
    [
        ("import lightning", "scaling"),
        ("from lightning.pytorch import Trainer", "numerics"),
        ("from torchmetrics import Metric", "scaling"),
        ("from lightning_amp.precision import AmpPrecision", "scaling"),
        ("from lightning_amp.scaling import StepRecord", "numerics"),
        ("from lightning_amp import callbacks", "precision"),
        ("def f():\n    import pytorch_lightning", "callbacks"),
    ],
)
def test_a_wrong_import_is_found(source: str, layer: str) -> None:
    assert wrong_imports(source, layer)


@pytest.mark.parametrize("file", [f for f in FILES if "_compat" not in f.parts], ids=lambda f: str(f.relative_to(ROOT)))
def test_private_names_are_in_compat_only(file: Path) -> None:
    assert private_uses(file.read_text(), own_private_names()) == []


@pytest.mark.parametrize(
    "source",
    [
        "scaler._scale",
        "self._growth_tracker",
        "torch._foreach_mul_(x, y)",
        "from torch._C import x",
        "from lightning.pytorch.trainer.call import _call_callback_hooks",
        "getattr(scaler, '_scale')",
        "trainer._logger_connector",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert private_uses(source, own_private_names())


def test_files_stay_short() -> None:
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES if "_compat" not in f.parts}
    assert {name: n for name, n in lengths.items() if n > 450} == {}


def test_every_public_name_works_and_nothing_else_is_public() -> None:
    contract = {
        "AmpPrecision", "FSDPAmpPrecision", "DynamicLossScaler", "StepRecord", "ScaleMonitor", "MetricComparison",
        "OverflowLocator", "GradientMonitor", "compare_precisions", "__version__",
    }  # fmt: skip
    public = set(lightning_amp.__all__)
    assert public <= contract
    folders = {p.stem for p in ROOT.iterdir() if not p.name.startswith("_")}
    assert {n for n in vars(lightning_amp) if not n.startswith("_")} - folders == public - {"__version__"}
    assert all(getattr(lightning_amp, name).__doc__ for name in public)


def test_import_is_light() -> None:
    """No plotting, no CLI, no distributed start-up on import; the cost in time is measured by tests/benchmarks."""
    heavy = ("matplotlib", "jsonargparse", "rich", "sklearn", "transformers", "torchao", "torch._dynamo.eval_frame")
    before = "import sys, lightning.pytorch; before = set(sys.modules)"
    code = f"{before}; import lightning_amp; print(sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    new = ast.literal_eval(out.strip().splitlines()[-1])
    assert [m for m in new if m.startswith(heavy)] == []
