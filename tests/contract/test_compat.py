"""Each entry of `_compat` says when to remove it, and none asks which version of torch or Lightning is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from support.source import PACKAGE, REMOVAL, Finding, Guard, Package, Source, findings, new_findings

A_VERSION = re.compile(r"__version__|version_info|\bVersion\(|metadata\.version\(")
VERSION = re.compile(r"\b(torch|Lightning|torchmetrics|Python) \d+\.\d+")


def entries(source: Source) -> Iterator[tuple[ast.stmt, str, str]]:
    """Return the public names at the top of a file, each with its docstring or the comment right above it."""
    return ((node, name, text) for node, name, text in source.described(source.tree.body) if name[0] != "_")


def without_an_end(package: Package) -> Iterator[Finding]:
    """Return the entries of `_compat` that say neither when to remove them nor with which existing entry."""
    for source in package:
        if source.room == "_compat":
            names = {name for _, name, _ in entries(source)}
            for node, name, text in entries(source):
                found = REMOVAL.search(text)
                if found is None or (found[2] and found[2] not in names - {name}):
                    yield Finding(source.path, node.lineno, f"{name} does not say when to remove it")


def asks_for_a_version(package: Package) -> Iterator[Finding]:
    """Return comparisons with a version; in `_compat`, also checks whether a library has a name.

    In `_compat`, such a check is allowed in an entry that names the version, as in "torch 2.13 has none".
    """
    for source in package:
        for node in source.nodes:
            if isinstance(node, ast.Compare) and A_VERSION.search(ast.unparse(node)):
                yield Finding(source.path, node.lineno, f"compares versions: {ast.unparse(node)}")
        if source.room == "_compat":
            excused = {inner for node, _, text in entries(source) if VERSION.search(text) for inner in ast.walk(node)}
            for node in source.nodes:
                if node not in excused and (asked := asks_for_a_name(source, node)):
                    yield Finding(source.path, getattr(node, "lineno", 1), f"asks whether there is {asked}")


def asks_for_a_name(source: Source, node: ast.AST) -> str:
    """Return the name in `hasattr(torch.amp, "x")`, `getattr(Tensor, "x", None)` or `try: import x`; else empty."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"hasattr", "getattr"}:
        is_question = ast.unparse(node.func) == "hasattr" or len(node.args) == 3
        return ast.unparse(node.args[1]) if is_question and is_of_a_library(source.meaning(node.args[0])) else ""
    if isinstance(node, ast.Try):
        caught = {ast.unparse(error) for h in node.handlers if h.type for error in ast.walk(h.type)}
        if caught & {"ImportError", "ModuleNotFoundError", "AttributeError"}:
            return ast.unparse(node.body[0])
    return ""


def is_of_a_library(name: str) -> bool:
    """Return whether a dotted name is a module or class of a library.

    Modules and classes differ by version. An instance's attributes differ by its state, so checking them is no version
    check.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute) if module else importlib.import_module(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return inspect.ismodule(found) or inspect.isclass(found)


GUARDS: list[Guard] = [without_an_end, asks_for_a_version]


@pytest.mark.parametrize("guard", GUARDS)
def test_compat(guard: Guard) -> None:
    assert findings(guard) == []


def test_there_are_entries() -> None:
    names = {name for source in PACKAGE if source.room == "_compat" for _, name, _ in entries(source)}
    assert {"foreach_mul_", "unwrap_optimizer", "plain_name"} <= names


@pytest.mark.parametrize(
    "text",
    [
        "def entry(): ...",
        'def entry():\n    """Do it. No public way."""',
        "# Remove when torch has one.\n\n\ndef entry(): ...",  # a section's comment, not the entry's own
        "# Remove when torch has one.\n\nCONSTANT = 1",
        'class Entry:\n    def f(self):\n        """Remove when torch has one."""',
        'def entry():\n    """Do it. Remove with `other`."""',
        'def entry():\n    """Do it. Remove with `entry`."""',
    ],
)
def test_an_entry_without_an_end_is_found(text: str) -> None:
    assert new_findings(without_an_end, PACKAGE.with_file("_compat/_bad.py", text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scaling/_bad.py", "import torch\nif torch.__version__ >= '2.14': ..."),
        ("_compat/_bad.py", "x = Version(torch.__version__) < Version('2.13')"),
        ("_compat/_bad.py", "x = 1 if sys.version_info < (3, 11) else 2"),
        ("_compat/_bad.py", "import torch\ndef entry():\n    return hasattr(torch, 'accelerator')"),
        ("_compat/_bad.py", "import torch\ndef entry():\n    return hasattr(torch.amp, 'x')"),
        ("_compat/_bad.py", "def entry():\n    from torch import Tensor\n    return getattr(Tensor, 'x', None)"),
        ("_compat/_bad.py", "try:\n    from torch import x\nexcept ImportError:\n    x = None"),
        (
            "_compat/_bad.py",
            "def entry():\n    try:\n        torch.x\n    except (TypeError, AttributeError):\n        ...",
        ),
    ],
)
def test_a_question_for_a_version_is_found(path: str, text: str) -> None:
    assert new_findings(asks_for_a_version, PACKAGE.with_file(path, text))
