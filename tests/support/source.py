"""Parse the source of the package once, and resolve the names in it. Nothing is imported.

A guard is a function from a :class:`Package` to findings; that it can fail is shown on `PACKAGE.with_file(...)`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import lightning_amp

TOP = "lightning_amp"
ROOT = Path(lightning_amp.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
REMOVAL = re.compile(r"\bremove (when|with `(\w+)`)", re.IGNORECASE)
"""What each use of another library's private name says: when to remove it, or with which other one."""


class Finding(NamedTuple):
    """A violation that a guard has found."""

    path: str
    line: int
    text: str

    @property
    def key(self) -> str:
        """Return the finding without its line, which may move."""
        return f"{self.path}: {self.text}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class Guard(Protocol):
    """A function that finds violations in a package."""

    __name__: str

    def __call__(self, package: Package) -> Iterable[Finding]: ...


class Import(NamedTuple):
    """`from module import name as bound`, or `import module` with an empty name; `bound` stands for `means`."""

    line: int
    module: str
    name: str
    bound: str
    means: str
    for_types_only: bool


class Source:
    """One file. `path` is relative to the package, such as `"scaling/_steps.py"`."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        parts = path.removesuffix(".py").split("/")
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join([TOP, *(parts[:-1] if self.is_package else parts)])
        self.room = parts[0] if len(parts) > 1 or not _is_private(parts[0]) else ""
        """The folder, or a public file at the top (`cli.py`); empty for the helpers beside them (`_files.py`)."""

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @functools.cached_property
    def imports(self) -> list[Import]:
        """Return all imports, also inside functions, and `import_module("...")`."""
        for_types: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                for_types.update(inner for statement in node.body for inner in ast.walk(statement))
        return [found for node in self.nodes for found in self._imports_of(node, node in for_types)]

    def _imports_of(self, node: ast.AST, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                means = alias.name if alias.asname else first
                yield Import(node.lineno, alias.name, "", alias.asname or first, means, for_types)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                here = self.module.split(".") + (["__init__"] if self.is_package else [])
                module = ".".join([*here[: -node.level], *([module] if module else [])])
            for alias in node.names:
                bound, means = alias.asname or alias.name, f"{module}.{alias.name}"
                yield Import(node.lineno, module, alias.name, bound, means, for_types)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [name.value for name in node.args[:1] if isinstance(name, ast.Constant)]
            yield from (Import(node.lineno, str(name), "", "", "", for_types) for name in names)

    @functools.cached_property
    def meanings(self) -> dict[str, str]:
        """Return the dotted names behind the names that a file imports or defines."""
        own = {node.name: f"{self.module}.{node.name}" for node in [*self.classes, *self.functions]}
        return {**own, **{each.bound: each.means for each in self.imports if each.bound}}

    @functools.cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    def described(self, body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str, str]]:
        """Yield functions, classes and assignments, each with its name, and its docstring or the comment above it."""
        lines = self.text.splitlines()
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, (Function, ast.ClassDef)):
                name, text = node.name, ast.get_docstring(node) or ""
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                is_described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                name, text = ast.unparse(target), str(following.value.value) if is_described else ""
                first = node.lineno
            else:
                continue
            above = first - 2
            while above >= 0 and lines[above].lstrip().startswith("#"):
                text = f"{lines[above].strip().lstrip('# ')} {text}"
                above -= 1
            yield node, name, " ".join(text.split())

    @functools.cached_property
    def with_an_end(self) -> set[int]:
        """Return the lines of functions, methods, classes and assignments that say when to remove them."""
        bodies = [self.tree.body, *(node.body for node in self.classes)]
        found = [node for body in bodies for node, _, text in self.described(body) if REMOVAL.search(text)]
        return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}

    def meaning(self, expression: ast.expr) -> str:
        """Return the dotted name behind an expression; `Sequence[int]` is a `Sequence`."""
        if isinstance(expression, (ast.Subscript, ast.Call)):
            return self.meaning(expression.value if isinstance(expression, ast.Subscript) else expression.func)
        first, dot, rest = ast.unparse(expression).partition(".")
        return self.meanings.get(first, first) + dot + rest


class Package:
    """All files of the package, by path."""

    def __init__(self, files: dict[str, Source]) -> None:
        self.files = files
        self.modules = {source.module: source for source in files.values()}

    @classmethod
    def load(cls) -> Package:
        paths = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
        return cls({name: Source(name, path.read_text(encoding="utf-8")) for name, path in paths.items()})

    def with_file(self, path: str, text: str) -> Package:
        """Return the package with a file added or replaced."""
        return Package({**self.files, path: Source(path, text)})

    def __iter__(self) -> Iterator[Source]:
        return iter(self.files.values())

    def target(self, found: Import) -> str:
        """Return our module that an import names, or the outside name that it imports."""
        inner = f"{found.module}.{found.name}"
        return inner if inner in self.modules else found.module

    @functools.cached_property
    def classes(self) -> dict[str, tuple[Source, ast.ClassDef]]:
        return {f"{source.module}.{node.name}": (source, node) for source in self for node in source.classes}

    def definition(self, name: str) -> str:
        """Return where a dotted name of ours is defined, behind the re-exports of rooms. Other names stay unchanged."""
        module, _, last = name.rpartition(".")
        if name in self.classes or module not in self.modules:
            return name
        behind = self.modules[module].meanings.get(last, name)
        return behind if behind == name else self.definition(behind)

    def bases(self, source: Source, node: ast.ClassDef) -> list[str]:
        return [self.definition(source.meaning(base)) for base in node.bases]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_private(name: str) -> bool:
    """Return whether a name is `_name`, but neither `__name__` nor a public method of a `NamedTuple`."""
    return _is_private(name) and name not in {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}


def named(node: ast.AST, *functions: str) -> tuple[ast.expr, str] | None:
    """Return object and attribute of a call such as `getattr(thing, "name")`, if it calls one of these functions."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in functions and len(node.args) > 1:
        name = node.args[1]
        return (node.args[0], name.value) if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
    return None


PACKAGE = Package.load()


def findings(guard: Guard) -> list[str]:
    """Return the violations that a guard finds in the package."""
    return [str(finding) for finding in guard(PACKAGE)]


def new_findings(guard: Guard, bad: Package) -> list[str]:
    """Return the violations that a guard finds in `bad` but not in the real package."""
    known = {finding.key for finding in guard(PACKAGE)}
    return [str(finding) for finding in guard(bad) if finding.key not in known]
