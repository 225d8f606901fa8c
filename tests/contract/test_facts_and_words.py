"""A fact stays a value until it is shown: no code parses our own sentences, and each kind is a `Literal`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.source import PACKAGE, Finding, Guard, Package, Source, findings, new_findings

_READERS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "find",
    "index",
}
_PATTERNS = {"re.match", "re.search", "re.fullmatch", "re.findall", "re.compile", "re.sub", "re.split"}


def sentences_read_back(package: Package) -> Iterator[Finding]:
    """Find code that looks for words in our own sentences.

    Examples: `text.startswith("not worse")`, `" in fp32" in text`, `re.search("takes (.*) seeds", text)`. The words
    count as ours if another literal of the package contains them. Single words are allowed, because settings, units and
    operations have such names. `_compat` may read the messages of other libraries.
    """
    written = [(source, node) for source in package for node in _literals(source)]
    for source in package:
        for node, text in _read(source) if source.room != "_compat" else ():
            words = _plain(text)
            if len(words.split()) > 1 and any(words in n.value and n is not node for _, n in written):
                yield Finding(source.path, node.lineno, f"reads {text!r} back out of a sentence")


def _literals(source: Source) -> list[ast.Constant]:
    docs = {
        statement.value
        for statement in source.nodes
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    return [n for n in source.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in docs]


def _read(source: Source) -> Iterator[tuple[ast.Constant, str]]:
    """Return the constants that code searches for in another text."""
    for node in source.nodes:
        looked_for: list[ast.expr] = []
        if isinstance(node, ast.Call) and node.args:
            function = node.func
            if (isinstance(function, ast.Attribute) and function.attr in _READERS) or ast.unparse(
                function
            ) in _PATTERNS:
                looked_for = node.args[0].elts if isinstance(node.args[0], ast.Tuple) else [node.args[0]]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            looked_for = [] if isinstance(node.comparators[0], (ast.Tuple, ast.Set, ast.List)) else [node.left]
        for each in looked_for:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each, each.value


def _plain(pattern: str) -> str:
    """Return the longest part of a regular expression that is plain words."""
    parts = [""]
    for letter in pattern:
        if letter.isalnum() or letter in " ,;:'`-":
            parts[-1] += letter
        else:
            parts.append("")
    return max(parts, key=len)


def kinds_typed_as_text(package: Package) -> Iterator[Finding]:
    """Find fields compared with constants, such as `remedy.kind == "clip"`, that are typed `str` and not `Literal`.

    A field called `name` is allowed: it says which object, not which kind.
    """
    compared = {name for source in package for name in _compared_with_text(source)}
    given = {field for source in package for field in _given_as_text(package, source)}
    for name, (source, node) in package.classes.items():
        for field in _fields(node):
            text = ast.unparse(field.annotation).replace(" ", "") in {"str", "str|None"}
            target = ast.unparse(field.target)
            if text and target != "name" and target in compared and (name, target) in given:
                yield Finding(source.path, field.lineno, f"{node.name}.{target} is no `Literal`")


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]


def _given_as_text(package: Package, source: Source) -> Iterator[tuple[str, str]]:
    """Return class and field wherever a call of the class passes a constant text."""
    for node in source.nodes:
        if (
            not isinstance(node, ast.Call)
            or (name := package.definition(source.meaning(node.func))) not in package.classes
        ):
            continue
        fields = [ast.unparse(field.target) for field in _fields(package.classes[name][1])]
        given = [*zip(fields, node.args, strict=False), *((keyword.arg, keyword.value) for keyword in node.keywords)]
        for field, value in given:
            values = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            if field and any(isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value for v in values):
                yield name, field


def _compared_with_text(source: Source) -> Iterator[str]:
    """Return the attributes that are compared with a text that is not empty."""
    for node in source.nodes:
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
            against = node.comparators[0]
            values = against.elts if isinstance(against, (ast.Tuple, ast.Set, ast.List)) else [against]
            if values and all(isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value for v in values):
                yield node.left.attr


GUARDS: list[Guard] = [sentences_read_back, kinds_typed_as_text]


@pytest.mark.parametrize("guard", GUARDS)
def test_facts(guard: Guard) -> None:
    assert findings(guard) == []


@pytest.mark.parametrize(
    "reader",
    [
        "text.startswith('it is quite')",
        "text.startswith(('a', 'it is quite'))",
        "'quite so' in text",
        "re.search(r'quite so (\\d+)', text)",
        "text.partition('is quite so')",
    ],
)
def test_a_sentence_that_is_read_back_is_found(reader: str) -> None:
    text = f"import re\ndef f(n):\n    text = f'it is quite so {{n}} times'\n    return {reader}"
    assert new_findings(sentences_read_back, PACKAGE.with_file("scaling/_bad.py", text))


@pytest.mark.parametrize(
    "reader", ["text.startswith('no words of ours')", "text.startswith('it')", "n in ('quite so',)"]
)
def test_what_is_no_sentence_of_ours(reader: str) -> None:
    text = f"def f(text, n):\n    print('it is quite so')\n    return {reader}"
    assert not new_findings(sentences_read_back, PACKAGE.with_file("scaling/_good.py", text))


@pytest.mark.parametrize("comparison", ["thing.colour == 'red'", "self.thing.colour in ('red', 'blue')"])
@pytest.mark.parametrize("given", ["'red'", "colour='red'", "colour='red' if f else g"])
def test_a_kind_that_is_text_is_found(comparison: str, given: str) -> None:
    text = (
        f"@final\nclass Thing:\n    colour: {{}}\n    def f(self, thing):\n        return {comparison}\nThing({given})"
    )
    assert new_findings(kinds_typed_as_text, PACKAGE.with_file("scaling/_bad.py", text.format("str")))
    good = text.format("Literal['red', 'blue']")
    assert not new_findings(kinds_typed_as_text, PACKAGE.with_file("scaling/_good.py", good))
