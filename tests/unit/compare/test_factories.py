"""Names of factories, and whether another process can import them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from zoo.compared import Sea, Waves

from lightning_amp.compare._factories import can_be_found, check_factory, factory_name, main_module, source_files


def make() -> Waves:
    return Waves()


def needs(width: int) -> Waves:
    return Waves(width)


class Maker:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self) -> Waves:
        return Waves(self.width)

    def make(self) -> Waves:
        return self()

    @classmethod
    def small(cls) -> Waves:
        return Waves(4)


@pytest.mark.parametrize("factory", [make, Waves, partial(needs, 3), Maker(3), Maker(3).make, Maker.small])
def test_factories_that_another_process_can_import(factory: Callable[[], Any]) -> None:
    check_factory("make_module", factory, L.LightningModule)


class FromCommand(Maker):
    def __repr__(self) -> str:
        return f"zoo.compared.Waves(width={self.width})"


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (Waves, "Waves"),
        (make, "make"),
        (partial(needs, 3), "needs(3)"),
        (partial(needs, width=make), "needs(width=make)"),
        (Maker(3), "Maker"),
        (Maker(3).make, "Maker.make"),
        (Maker.small, "Maker.small"),
        (FromCommand(3), "Waves(width=3)"),
    ],
)
def test_names_are_those_that_a_person_would_write(factory: Any, name: str) -> None:
    assert factory_name(factory) == name


def nested() -> Any:
    def inside() -> Waves:
        return Waves()

    return inside


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: Waves(4), "`make_module` is a lambda, which another process cannot import. Move it to the top level"),
        (nested(), "defined inside of a function.*pass `models.inside`"),
        (partial(lambda width=4: Waves(width)), "is a lambda"),
        (needs, "callable without arguments; 'needs': missing a required argument: 'width'. Write a function"),
        (Waves(), "got an object of Waves. Pass the class itself"),
        (Sea(), "got an object of Sea. Pass the class itself"),
        ("models.Waves", "must be a LightningModule, or a function without arguments that returns one, got 'models"),
        (None, "got None"),
        (partial(needs, width=open(__file__)), "cannot be sent to another process: TypeError"),  # noqa: SIM115
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_refusals(factory: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_factory("make_module", factory, L.LightningModule)


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> Waves:
        return Waves()

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ValueError, match=r"defined in a notebook or at a prompt.*%%writefile models.py"):
        check_factory("make_module", cell, L.LightningModule)


def test_a_function_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    old = make
    monkeypatch.setattr(sys.modules[__name__], "make", needs)
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        check_factory("make_module", old, L.LightningModule)


def test_modules_that_no_path_leads_to(tmp_path: Path) -> None:
    file = tmp_path / "odd_place.py"
    file.write_text("def make(): ...\n")
    spec = importlib.util.spec_from_file_location("odd_place", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["odd_place"] = module
    try:
        assert source_files(module.make) == {"odd_place": str(file)}
        assert source_files(SimpleNamespace(__wrapped__=module.make)) == {"odd_place": str(file)}
        assert not can_be_found("odd_place", str(file))
        assert can_be_found("zoo.compared", source_files(Waves)["zoo.compared"])
        assert not can_be_found("zoo.compared", str(file))
        assert not can_be_found("no.such.module", str(file))
    finally:
        del sys.modules["odd_place"]


def test_the_script_is_found_by_its_name_or_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = sys.modules["__main__"]
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    assert main_module() == {"path": str(tmp_path / "script.py")}
    monkeypatch.delattr(main, "__file__")
    assert main_module() is None
    monkeypatch.setattr(main, "__spec__", importlib.util.spec_from_loader("package.script", None))
    assert main_module() == {"name": "package.script"}
