"""Rooms, files and classes have a shape: a file to read first, limited length, final or abstract classes, no writes
from outside.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from collections.abc import Iterator

import pytest
from support.source import PACKAGE, Finding, Function, Guard, Package, Source, findings, named, new_findings

LONGEST = 450

FOR_SUBCLASSES = {"AmpPrecision", "FSDPAmpPrecision", "ScaledSteps"}
"""Users adapt a precision plugin by deriving from it, as the tests do, so plugins are not final.

All other public classes are used as they are. A user's callback derives from `Callback`. A user's scaler derives from
`torch.amp.GradScaler`, which the plugin also accepts.
"""

MADE_BY_TYPING = {"NamedTuple", "TypedDict", "Protocol", "Enum", "IntEnum", "Flag", "IntFlag", "ABC"}
"""Base classes that make their subclasses final or abstract by themselves."""


# -- files -------------------------------------------------------------------------------------------------------------


def too_long(package: Package) -> Iterator[Finding]:
    """A file may have 450 lines, so that one whole class fits; a class is not cut in two to keep the limit."""
    for source in package:
        if (length := source.text.count("\n")) > LONGEST:
            yield Finding(source.path, length, f"is longer than {LONGEST} lines")


def without_a_first_file(package: Package) -> Iterator[Finding]:
    """Each room names the file to read first: it is called like the room, or the docstring of `__init__` names it."""
    for source in package:
        if not source.is_package or source.room == "__init__":
            continue
        folder = source.path.removesuffix("__init__.py")
        name = folder.rstrip("/").rpartition("/")[2]
        named_first = re.findall(r"`([\w/]+\.py)`", ast.get_docstring(source.tree) or "")
        if not any(f"{folder}{file}" in package.files for file in (f"{name}.py", f"_{name}.py", *named_first)):
            yield Finding(source.path, 1, "names no file to read first")


# -- classes -----------------------------------------------------------------------------------------------------------


def neither_final_nor_abstract(package: Package) -> Iterator[Finding]:
    """A class is abstract if it has an abstract method or if another class of ours derives from it."""
    derived_from = {base for source, node in package.classes.values() for base in package.bases(source, node)}
    for name, (source, node) in package.classes.items():
        if node.name in FOR_SUBCLASSES or name in derived_from or "final" in decorators(node):
            continue
        bases = {base.rpartition(".")[2] for base in package.bases(source, node)}
        if bases & MADE_BY_TYPING or any(is_exception(base) for base in bases):
            continue
        if not any("abstractmethod" in decorators(method) for method in methods(node)):
            yield Finding(source.path, node.lineno, f"{node.name} is neither final nor abstract")


def without_override(package: Package) -> Iterator[Finding]:
    """Return the methods of a class, without `__dunder__` methods and aliases."""
    for name, (source, node) in package.classes.items():
        inherited = {n for base in package.bases(source, node) for n in names_of(package, base)}
        for method in methods(node):
            if method.name in inherited and not is_dunder(method.name) and "override" not in decorators(method):
                short = name.rpartition(".")[2]
                yield Finding(source.path, method.lineno, f"{short}.{method.name} overrides without @override")


def cut_apart(package: Package) -> Iterator[Finding]:
    """A class of ours with exactly one subclass is one class in two places."""
    below: dict[str, list[str]] = {}
    for name, (source, node) in package.classes.items():
        for base in package.bases(source, node):
            below.setdefault(base, []).append(name)
    for name, (source, node) in package.classes.items():
        if len(below.get(name, ())) == 1 and node.name not in FOR_SUBCLASSES:
            (child,) = below[name]
            yield Finding(source.path, node.lineno, f"{node.name} has one subclass only: {child.rpartition('.')[2]}")


def methods(node: ast.ClassDef) -> list[Function]:
    return [statement for statement in node.body if isinstance(statement, Function)]


def decorators(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def names_of(package: Package, base: str) -> set[str]:
    """Return all names that a class inherits: from our classes by their source, from others by importing them."""
    if base in package.classes:
        source, node = package.classes[base]
        inherited = {name for above in package.bases(source, node) for name in names_of(package, above)}
        return inherited | {method.name for method in methods(node)}
    return set() if base.rpartition(".")[2] in MADE_BY_TYPING else set(dir(imported(base)))


@functools.cache
def imported(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute) if module else getattr(builtins, name)


# -- objects -----------------------------------------------------------------------------------------------------------


def written_from_outside(package: Package) -> Iterator[Finding]:
    """Find writes such as `window.scale = ...` to an attribute of an object of another room.

    The attribute counts by its name, because nothing here knows types. Allowed are: an object that the function itself
    is making (`new = copy.copy(old)`, or `Class.CONSTANT = ...` at the top of a file); `_compat`, and what says when to
    remove it, which handle objects of torch and Lightning; attributes that no class of ours has (`parameter.grad`,
    `module.trainer`). The search misses `x.things.append(...)`, `vars(x).update(...)`, computed names, and a `self`
    that is not the argument of a method.
    """
    rooms: dict[str, set[str]] = {}
    for source in package:
        rooms.setdefault(source.room, set()).update(attributes(source))
    for source in package:
        if source.room == "_compat":
            continue
        others = set().union(*(names for room, names in rooms.items() if room not in ("_compat", source.room)))
        for target, name in foreign_writes(source):
            if name in others - rooms[source.room] and target.lineno not in source.with_an_end:
                yield Finding(source.path, target.lineno, f"{ast.unparse(target)}.{name} is written from outside")


@functools.cache
def foreign_writes(source: Source) -> list[tuple[ast.expr, str]]:
    """Return object and attribute of each write to an object that is neither `self` nor just being made."""
    writes = [(function, *found) for function, node in with_functions(source) for found in written(node)]
    return [(x, name) for function, x, name in writes if not (isinstance(x, ast.Name) and is_made(function, x.id))]


@functools.cache
def attributes(source: Source) -> set[str]:
    """Return the names that the classes of a file assign on `self` or in their body."""
    names: set[str] = set()
    for node in source.classes:
        names |= {name for inner in ast.walk(node) for target, name in written(inner) if ast.unparse(target) == "self"}
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not is_dunder(name)}


def written(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Return object and attribute of an assignment, a deletion, or a `setattr` with a constant name."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.value, node.attr
    elif (found := named(node, "setattr", "delattr", "object.__setattr__")) is not None:
        yield found


def with_functions(source: Source) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield every node with the innermost function around it."""
    innermost: dict[ast.AST, ast.AST] = {}
    for function in source.functions:  # outer functions first
        innermost.update((node, function) for node in ast.walk(function) if node is not function)
    return ((innermost.get(node, source.tree), node) for node in source.nodes)


def is_made(function: ast.AST, name: str) -> bool:
    """Return whether a name is `self`, holds a copy or a `__new__`, or is a class at the top of its own file."""
    if isinstance(function, ast.Module):
        return any(isinstance(node, ast.ClassDef) and node.name == name for node in function.body)
    if name in {"self", "cls"}:
        return True
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            return called.endswith(("copy.copy", "__new__"))
    return False


# -- tests -------------------------------------------------------------------------------------------------------------

GUARDS: list[Guard] = [
    too_long, without_a_first_file, neither_final_nor_abstract, cut_apart, without_override, written_from_outside,
]  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_the_shape(guard: Guard) -> None:
    assert findings(guard) == []


def test_a_long_file_is_found() -> None:
    assert new_findings(too_long, PACKAGE.with_file("_compat/_bad.py", "\n" * (LONGEST + 1)))
    assert not new_findings(too_long, PACKAGE.with_file("_compat/_good.py", "\n" * LONGEST))


@pytest.mark.parametrize("docstring", ["", '"""What is in it. Read `_missing.py` first."""', '"""Read _first.py."""'])
def test_a_room_without_a_first_file_is_found(docstring: str) -> None:
    bad = PACKAGE.with_file("attic/__init__.py", docstring).with_file("attic/_first.py", "")
    assert new_findings(without_a_first_file, bad) == ["attic/__init__.py:1: names no file to read first"]


def test_a_class_cut_in_two_is_found() -> None:
    one = PACKAGE.with_file("scaling/_bad.py", "class Bad: ...\n@final\nclass All(Bad): ...")
    assert new_findings(cut_apart, one) == ["scaling/_bad.py:1: Bad has one subclass only: All"]
    two = PACKAGE.with_file("scaling/_good.py", "class A: ...\n@final\nclass B(A): ...\n@final\nclass C(A): ...")
    assert not new_findings(cut_apart, two)


@pytest.mark.parametrize(
    "text",
    [
        "class Bad: ...",
        "@dataclass\nclass Bad: ...",
        "from lightning.pytorch import Callback\nclass Bad(Callback): ...",
        "def f():\n    class Bad(dict[str, int]): ...",
    ],
)
def test_a_class_that_is_neither_final_nor_abstract_is_found(text: str) -> None:
    assert new_findings(neither_final_nor_abstract, PACKAGE.with_file("scaling/_bad.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "from lightning.pytorch import Callback\nclass Bad(Callback):\n    def on_train_end(self): ...",
        "import lightning.pytorch as pl\nclass Bad(pl.Callback):\n    @property\n    def state_key(self): ...",
        "from lightning_amp.precision import AmpPrecision\nclass Bad(AmpPrecision):\n    def backward(self): ...",
        "class A:\n    def f(self): ...\nclass Middle(A): ...\nclass Bad(Middle):\n    def f(self): ...",
    ],
)
def test_a_missing_override_is_found(text: str) -> None:
    assert new_findings(without_override, PACKAGE.with_file("callbacks/_bad.py", text))


@pytest.mark.parametrize(
    "statement",
    [
        "thing.colour = 1",
        "self.thing.colour = 1",
        "things[0].colour += 1",
        "first, thing.colour = 1, 2",
        "del thing.colour",
        "setattr(thing, 'colour', 1)",
        "object.__setattr__(thing, 'weight', 1)",
        "thing.size: int = 1",
        "with f() as thing.colour: ...",
        "Thing.colour = 1",
    ],
)
def test_a_write_from_outside_is_found(statement: str) -> None:
    ours = "class Thing:\n    weight: int\n    size = 0\n    def __init__(self):\n        self.colour = 0\n"
    text = f"def f(self, thing, things):\n    {statement}"
    package = PACKAGE.with_file("scaling/_things.py", ours)
    assert new_findings(written_from_outside, package.with_file("precision/_bad.py", text))
    assert not new_findings(written_from_outside, package.with_file("scaling/_good.py", text))
