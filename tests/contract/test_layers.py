"""Hold the order of the rooms, and keep Lightning out of the rooms that are plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.source import PACKAGE, ROOT, TOP, Finding, Guard, Import, Package, Source, findings, new_findings

LAYERS = [
    ["_compat"],
    [""],  # helpers at the top level: `_files.py`, `_text.py`, ...
    ["numerics"],
    ["findings", "measure"],
    ["scaling", "casting", "tracing"],
    ["reports", "skipped_steps"],
    ["precision"],
    ["shadow"],
    ["causes"],
    ["callbacks"],
    ["compare"],
    ["advice", "tune"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
"""A room may import from itself and from the lines above its own."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
_PLAIN = ("numerics", "findings", "measure", "scaling", "tracing", "reports")
WITHOUT = {room: {*LIGHTNING, "torchmetrics"} for room in _PLAIN} | {
    "casting": LIGHTNING,
    "_compat/_torch.py": {*LIGHTNING, "torchmetrics"},
    "_compat/_modules.py": {*LIGHTNING, "torchmetrics"},
}
"""Imports that a plain room or file must not reach, directly or through other files."""


def wrong_directions(package: Package) -> Iterator[Finding]:
    """Return imports from a room above or beside, including those for annotations."""
    for source in package:
        if source.room not in LEVEL:
            yield Finding(source.path, 1, f"the room {source.room} has no place in `LAYERS`")
            continue
        for found in source.imports:
            target = package.modules.get(package.target(found))
            if target is not None and target.room != source.room and LEVEL[target.room] >= LEVEL[source.room]:
                yield Finding(source.path, found.line, f"imports {target.path}, from above or beside")


def imported_at_run_time(package: Package, source: Source) -> set[str]:
    """Return the modules that run when this one does, or later in one of its functions, and outside names as they are.

    `lightning_amp/__init__.py` runs before all of them and imports everything. It counts only where a name is taken
    from it.
    """
    names: set[str] = set()
    for found in source.imports:
        if not found.for_types_only:
            target = package.target(found)
            parents = [name for name in package.modules if target.startswith(f"{name}.") and name != TOP]
            names.update([target, *parents])
    return names


def forbidden_chains(package: Package) -> Iterator[Finding]:
    """Return each chain of imports from a plain room to a module that plain rooms must not reach."""
    graph = {name: imported_at_run_time(package, source) for name, source in package.modules.items()}
    for place, forbidden in WITHOUT.items():
        chains = {s.module: s.module for s in package if place in (s.room, s.path)}
        for name in (queue := list(chains)):
            for target in sorted(graph[name]):
                if target.split(".")[0] in forbidden:
                    text = f"{place} is plain torch: {chains[name]} -> {target}"
                    yield Finding(package.modules[name].path, 1, text)
                elif target in graph and target not in chains:
                    chains[target] = f"{chains[name]} -> {target}"
                    queue.append(target)


def other_package(package: Package) -> Iterator[Finding]:
    for source in package:
        for found in source.imports:
            if found.module.split(".")[0] == "pytorch_lightning":
                yield Finding(source.path, found.line, "imports pytorch_lightning, which is not `lightning.pytorch`")


def circles(package: Package) -> Iterator[Finding]:
    """Return groups of files that import each other, directly or through others.

    Imports inside functions and for annotations count. An import from a package counts as one from the file that
    defines the name, because `__init__` only passes names on.
    """
    graph = {
        source.module: {target for found in source.imports if (target := _file_of(package, found))}
        for source in package
        if not source.is_package
    }
    for group in _strongly_connected(graph):
        if len(group) > 1:
            paths = sorted(package.modules[name].path for name in group)
            yield Finding(paths[0], 1, f"imports in a circle with {', '.join(paths[1:])}")


def _file_of(package: Package, found: Import) -> str:
    """Return the file of ours that defines an imported name; empty if none does."""
    defined = package.definition(f"{found.module}.{found.name}") if found.name else found.module
    while defined and defined not in package.modules:
        defined = defined.rpartition(".")[0]
    return "" if not defined or package.modules[defined].is_package else defined


def _strongly_connected(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Return the groups in which every node reaches every other one."""
    reaches = {node: _reached(graph, node) for node in graph}
    left = set(graph)
    while left:
        node = left.pop()
        group = {node} | {other for other in reaches[node] & left if node in reaches[other]}
        left -= group
        yield group


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    queue, seen = [start], set[str]()
    while queue:
        new = graph.get(queue.pop(), set()) - seen
        seen |= new
        queue.extend(new)
    return seen


GUARDS: list[Guard] = [wrong_directions, forbidden_chains, other_package]


@pytest.mark.parametrize("guard", GUARDS)
def test_imports(guard: Guard) -> None:
    assert findings(guard) == []


def test_circles() -> None:
    assert findings(circles) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scaling/_bad.py", "from lightning_amp.precision import AmpPrecision"),
        ("scaling/_bad.py", "from lightning_amp.precision._amp import AmpPrecision"),
        ("scaling/_bad.py", "from lightning_amp.casting import Choice"),  # a room beside
        ("casting/_bad.py", "import lightning_amp.tracing"),
        ("numerics/_bad.py", "def f():\n    from lightning_amp import scaling"),
        ("precision/_bad.py", "from lightning_amp import callbacks"),
        ("callbacks/_bad.py", "from lightning_amp import AmpPrecision"),
        ("precision/_bad.py", "from ..shadow import find"),
        ("_bad.py", "from lightning_amp.numerics import limits"),
        ("_compat/_bad.py", "from lightning_amp import _files"),
        ("cellar/_bad.py", ""),
    ],
)
def test_a_wrong_direction_is_found(path: str, text: str) -> None:
    assert new_findings(wrong_directions, PACKAGE.with_file(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scaling/_good.py", "from lightning_amp._compat import _torch\nfrom lightning_amp._files import LEFTOVER"),
        ("scaling/_good.py", "from lightning_amp.scaling._steps import OptimizerSteps"),
        ("cli/_good.py", "from lightning_amp import AmpPrecision"),
        ("__main__.py", "from lightning_amp.cli import main"),
    ],
)
def test_a_right_direction_is_not(path: str, text: str) -> None:
    assert new_findings(wrong_directions, PACKAGE.with_file(path, text)) == []


@pytest.mark.parametrize(
    ("files", "chain"),
    [
        ({"scaling/_bad.py": "import lightning"}, "scaling._bad -> lightning"),
        ({"tracing/_bad.py": "def f():\n    from pytorch_lightning import Trainer"}, "-> pytorch_lightning"),
        ({"numerics/_bad.py": "from torchmetrics import Metric"}, "-> torchmetrics"),
        ({"casting/_bad.py": "import lightning_utilities.core"}, "-> lightning_utilities.core"),
        ({"reports/_bad.py": "import importlib\nimportlib.import_module('lightning.fabric')"}, "-> lightning.fabric"),
        ({"scaling/_bad.py": "from lightning_amp import AmpPrecision"}, "scaling._bad -> lightning_amp -> "),
        (
            {"_helper.py": "def f():\n    import lightning", "scaling/_bad.py": "from lightning_amp import _helper"},
            "scaling._bad -> lightning_amp._helper -> lightning",
        ),
        (
            {
                "casting/__init__.py": "from lightning_amp.casting._deep import x",
                "casting/_deep.py": "from lightning_amp._compat._lightning import run_hook",
                "reports/_bad.py": "from lightning_amp.casting._deep import x",
            },
            "reports._bad -> lightning_amp.casting._deep -> lightning_amp._compat._lightning -> lightning",
        ),
    ],
)
def test_a_chain_to_lightning_is_found(files: dict[str, str], chain: str) -> None:
    bad = PACKAGE
    for path, text in files.items():
        bad = bad.with_file(path, text)
    assert any(chain in finding for finding in new_findings(forbidden_chains, bad))


def test_what_is_no_chain_to_lightning() -> None:
    good = PACKAGE.with_file("casting/_good.py", "from torchmetrics import Metric\nfrom lightning_amp import _files")
    good = good.with_file("scaling/_good.py", "if TYPE_CHECKING:\n    from lightning.pytorch import Trainer")
    assert new_findings(forbidden_chains, good) == []


def test_the_other_package_is_found() -> None:
    bad = "def f():\n    import pytorch_lightning.callbacks"
    assert new_findings(other_package, PACKAGE.with_file("callbacks/_bad.py", bad))


@pytest.mark.parametrize(
    "first",
    [
        "from lightning_amp.scaling._b import b",
        "def f():\n    import lightning_amp.scaling._b",
        "if TYPE_CHECKING:\n    from lightning_amp.scaling._b import b",
    ],
)
def test_a_circle_is_found(first: str) -> None:
    bad = PACKAGE.with_file("scaling/_a.py", first).with_file("scaling/_b.py", "from lightning_amp.scaling import _a")
    assert new_findings(circles, bad) == ["scaling/_a.py:1: imports in a circle with scaling/_b.py"]


def test_a_circle_over_a_room_is_found() -> None:
    bad = PACKAGE.with_file("scaling/__init__.py", "from lightning_amp.scaling._a import a")
    bad = bad.with_file("scaling/_a.py", "from lightning_amp.scaling._b import b\ndef a(): ...")
    bad = bad.with_file("scaling/_b.py", "from lightning_amp.scaling import a\ndef b(): ...")
    assert any("scaling/_a.py" in found and "scaling/_b.py" in found for found in new_findings(circles, bad))


def test_the_contributing_guide_shows_the_order_and_every_room() -> None:
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {source.room for source in PACKAGE}
    layers = [[room or "helpers" for room in layer if room in rooms] for layer in LAYERS[: LAYERS.index(["__init__"])]]
    assert "\n" + " < ".join(", ".join(layer) for layer in layers if layer) + "\n" in guide
    assert [room for room in rooms if room.isidentifier() and f"`{room}/`" not in guide and room[0] != "_"] == []
