"""Private names of torch and Lightning stay in `_compat`, or where a text beside them says when to remove them.

A room's private names stay in the room.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import TypeGuard

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from support.source import (
    PACKAGE,
    TOP,
    Finding,
    Guard,
    Import,
    Package,
    Source,
    findings,
    is_private,
    named,
    new_findings,
)  # fmt: skip

UPSTREAM = {
    name
    for owner in (torch.amp.GradScaler("cpu"), MixedPrecision, Callback, LightningModule)
    for name in dir(owner)
    if is_private(name)
}
"""Names that a class of ours inherits from torch or Lightning; they count on `self`, too."""

UPSTREAM_ELSEWHERE = UPSTREAM | {
    name
    for owner in (LightningModule(), Trainer, torch.Tensor, torch.optim.SGD([torch.zeros(1)]), torch.nn.Parameter)
    for name in dir(owner)
    if is_private(name)
}
"""Names that count on any other object. On `self` they may be our own: one of our classes may have its own `_buffers`.
"""


@functools.cache
def private_names(package: Package) -> dict[str, set[str]]:
    """Return the private names that each room's files define."""
    names: dict[str, set[str]] = {}
    for source in package:
        names.setdefault(source.room, set()).update(private_names_of(source))
    return names


@functools.cache
def private_names_of(source: Source) -> set[str]:
    """Return the private names of functions, classes, variables and attributes of `self`."""
    own = {node.name for node in [*source.functions, *source.classes]}
    for node in source.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif is_set_on_self(node):
            own.add(node.attr)
    return {name for name in own if is_private(name)} - UPSTREAM


def is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and ast.unparse(node.value) in {"self", "cls"}


def of_others(package: Package) -> Iterator[Finding]:
    """Return uses of other libraries' private names outside of `_compat` that do not say when to remove them."""
    for source in package:
        if source.room == "_compat":
            continue
        yield from (found for found in _of_others(package, source) if found.line not in source.with_an_end)


def _of_others(package: Package, source: Source) -> Iterator[Finding]:
    ours = set().union(*private_names(package).values())
    for node, name, on_self in used(source):
        if name not in ours or (not on_self and name in UPSTREAM_ELSEWHERE):
            yield Finding(source.path, node.lineno, f"uses the private name .{name} of another library")
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in UPSTREAM:
            yield Finding(source.path, node.lineno, f"spells the private name {node.value!r} of another library")
    for found in source.imports:
        parts = [*found.module.split("."), found.name]
        if parts[0] != TOP and any(is_private(part) for part in parts):
            yield Finding(source.path, found.line, f"imports {'.'.join(parts).rstrip('.')}")


def of_other_rooms(package: Package) -> Iterator[Finding]:
    """Return uses of one room's private names in another room.

    They count on `self`, too, in a class that derives from another room's class. Names are compared as text, so two
    rooms with the same name are not told apart.
    """
    for source in package:
        for node, name, _ in used(source) if source.room != "_compat" else ():
            rooms = [room for room, names in private_names(package).items() if name in names]
            if rooms and source.room not in rooms and node.lineno not in source.with_an_end:
                yield Finding(source.path, node.lineno, f"uses .{name}, a private name of {' and '.join(rooms)}/")
        for found in source.imports:
            target = package.modules.get(package.target(found))
            if target not in {None, source} and is_hidden(target, found, source):
                text = f"imports {target.path} {found.name}".rstrip()
                yield Finding(source.path, found.line, f"{text}, which is private to its room")


def is_hidden(target: Source, found: Import, importer: Source) -> bool:
    """Return whether an import names another room's private file, or a private name in it.

    The top-level files and the files of `_compat` are open to all rooms; the private names inside them are not.
    """
    name = found.name if target.module == found.module else ""
    if target.room in {"", "_compat"}:
        return is_private(name)
    return target.room != importer.room and (is_private(target.module.rpartition(".")[2]) or is_private(name))


@functools.cache
def used(source: Source) -> list[tuple[ast.expr, str, bool]]:
    """Return the private attributes that a file uses, by name or `getattr`, and whether on `self` or `cls`."""
    uses: list[tuple[ast.expr, str, bool]] = []
    modules = {found.bound for found in source.imports if found.means.startswith(TOP)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif (found := named(node, "getattr", "hasattr", "setattr", "delattr")) is not None:
            owner, name = found
        else:
            continue
        if is_private(name) and not (name == "_compat" and ast.unparse(owner) in modules):
            uses.append((owner, name, ast.unparse(owner) in {"self", "cls"}))
    return uses


GUARDS: list[Guard] = [of_others, of_other_rooms]


@pytest.mark.parametrize("guard", GUARDS)
def test_private_names(guard: Guard) -> None:
    assert findings(guard) == []


@pytest.mark.parametrize(
    "text",
    [
        "scaler._scale",
        "self._growth_tracker",
        "module._buffers",
        "torch._foreach_mul_(x, y)",
        "from torch._C import x",
        "from lightning.pytorch.trainer.call import _call_callback_hooks",
        "getattr(scaler, '_scale')",
        "getattr(module, '_compiler_ctx', None)",
        "trainer._logger_connector",
        "names = ['_scale']",
    ],
)
def test_a_private_name_of_others_is_found(text: str) -> None:
    assert new_findings(of_others, PACKAGE.with_file("scaling/_bad.py", text))


@pytest.mark.parametrize(
    "text",
    [
        'def f(scaler):\n    """Read it. Remove when torch has a getter."""\n    return scaler._scale',
        "class A:\n    # Remove with `f`.\n    @property\n    def f(self):\n        return self.unit._buffers",
        'class A:\n    """Remove when torch has it."""\n    def f(self):\n        from torch._C import x\n        x()',
        'NAMES = ["_scale"]\n"""Remove when they are public."""',
    ],
)
def test_a_private_name_of_others_that_says_when_to_remove_it(text: str) -> None:
    assert not new_findings(of_others, PACKAGE.with_file("scaling/_good.py", text))


OURS = "def _find(): ...\nclass Thing:\n    def __init__(self):\n        self._colour = _find()\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("callbacks/_bad.py", "from lightning_amp.cellar._thing import Thing"),
        ("callbacks/_bad.py", "from lightning_amp.cellar import _thing"),
        ("callbacks/_bad.py", "import lightning_amp.cellar._thing as thing"),
        ("callbacks/_bad.py", "from lightning_amp.cellar import _find"),
        ("callbacks/__init__.py", "from lightning_amp.cellar._thing import Thing"),
        ("callbacks/_bad.py", "def f(thing):\n    return thing._colour"),
        ("callbacks/_bad.py", "class Bad(Thing):\n    def f(self):\n        return self._colour"),
        ("callbacks/_bad.py", "def f(thing):\n    return getattr(thing, '_colour')"),
        ("callbacks/_bad.py", "from lightning_amp._files import _create"),
        ("_bad.py", "from lightning_amp._files import _create"),
        ("scaling/_bad.py", "from lightning_amp._compat._torch import _unsafe_view"),
    ],
)
def test_a_private_name_of_another_room_is_found(path: str, text: str) -> None:
    package = PACKAGE.with_file("cellar/__init__.py", "from lightning_amp.cellar._thing import Thing, _find")
    assert new_findings(of_other_rooms, package.with_file("cellar/_thing.py", OURS).with_file(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cellar/_good.py", "from lightning_amp.cellar._thing import _find"),
        ("cellar/_good.py", "def f(thing):\n    return thing._colour"),
        ("cellar/_thing.py", f"{OURS}def f(thing):\n    return thing._colour"),
        ("callbacks/_good.py", "class Good:\n    def __init__(self):\n        self._colour = self._files = 1"),
        ("callbacks/_good.py", "from lightning_amp import _files\nfrom lightning_amp._compat import _torch"),
        ("callbacks/_good.py", "from lightning_amp.cellar import Thing\nThing()._replace(colour=1)"),
        ("callbacks/_good.py", "import lightning_amp\nlightning_amp._compat"),
    ],
)
def test_what_is_private_and_fine(path: str, text: str) -> None:
    package = PACKAGE.with_file("cellar/__init__.py", "from lightning_amp.cellar._thing import Thing")
    package = package.with_file("cellar/_thing.py", OURS).with_file(path, text)
    assert [new_findings(guard, package) for guard in GUARDS] == [[], []]
