"""Check that another process can import the user's factories, name the factories, and find their files."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp.compare._describe import main_path, shown


def by_value(factory: Any) -> bool:
    """Return whether another process cannot import a factory by its name: it has none, or is of no file."""
    function = _function(factory)
    where = getattr(function, "__qualname__", "")
    return "<lambda>" in where or "<locals>" in where or (_module_name(factory) == "__main__" and main_path() is None)


def dumps_for(executor: object, *factories: Any) -> Callable[[Any], bytes]:
    """Return `pickle.dumps`, or `cloudpickle.dumps` if an executor gets a factory that has no importable name.

    Raises:
        ModuleNotFoundError: If cloudpickle is needed and not installed.

    """
    if executor is None or not any(map(by_value, factories)):
        return pickle.dumps
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A factory that cannot be imported by its name is sent with cloudpickle, which is not installed. Run"
            " `pip install cloudpickle`, or move the factory to the top level of a file."
        ) from error
    return cloudpickle.dumps


def check_factory(argument: str, factory: Any, kind: type, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
    """Refuse a factory that another process cannot import and call.

    Args:
        argument: The name of the argument.
        factory: The factory.
        kind: The class of the objects that it returns.
        dumps: How it is sent: by :func:`dumps_for`.

    Raises:
        ValueError: If the factory is refused. The message explains how to write it instead.

    """
    example = f"a {kind.__name__}, or a function without arguments that returns one"
    if isinstance(factory, (LightningModule, LightningDataModule)):
        name = type(factory).__name__
        raise ValueError(
            f"`{argument}` must be {example}, got an object of {name}. Pass the class itself (`{name}`), or a function"
            " that makes one: each arm needs a new one, made after its seed was set."
        )
    if not callable(factory):
        raise ValueError(f"`{argument}` must be {example}, got {factory!r}.")
    function = _function(factory)
    name = getattr(function, "__name__", type(factory).__name__)
    where = getattr(function, "__qualname__", "")
    obstacle = more = ""
    if name == "<lambda>":
        obstacle, name = "is a lambda", "make"
    elif "<locals>" in where:
        obstacle = f"is {where!r}, defined inside of a function"
    elif _module_name(factory) == "__main__" and main_path() is None:
        obstacle = f"is {name!r}, defined in a notebook or at a prompt"
        more = " In a notebook, `%%writefile models.py` as the first line of a cell does that."
    move = (
        f"Move it to the top level of a file, for example `models.py`, and pass `models.{name}`. Each arm runs in a"
        " process of its own, which has to import it."
    )
    if obstacle and dumps is pickle.dumps:
        sent = " An `executor`, such as `LocalDevices()`, sends it with cloudpickle as it is."
        raise ValueError(f"`{argument}` {obstacle}, which another process cannot import. {move}{more}{sent}")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"`{argument}` must be callable without arguments; {name!r}: {error}. Write a function that passes them:"
            f" `def make(): return {name}(...)`."
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        pickle.loads(dumps(factory))
    except Exception as error:
        text = f"`{argument}` cannot be sent to another process: {type(error).__name__}: {error}."
        raise ValueError(f"{text} {move}") from error


def factory_name(factory: Any) -> str:
    """Return the name that a person would write: `Net`, `make_net`, `Net(width=64)`."""
    if isinstance(factory, partial):
        arguments = [*map(shown, factory.args), *(f"{name}={shown(value)}" for name, value in factory.keywords.items())]
        return f"{factory_name(factory.func)}({', '.join(arguments)})"
    name = getattr(factory, "__qualname__", None) or shown(factory)
    return re.sub(r"^(\w+\.)+(?=\w+\()", "", name)  # a factory of the command line names its classes with their modules


def source_files(*factories: Any) -> dict[str, str]:
    """Return the file of each factory's module, for a process that does not find the module by its name."""
    files: dict[str, str] = {}
    for factory in factories:
        name = _module_name(getattr(factory, "__wrapped__", factory))
        file = getattr(sys.modules.get(name), "__file__", None)
        if name != "__main__" and file is not None:
            files[name] = str(Path(file).resolve())
    return files


def main_module() -> dict[str, str] | None:
    """Return where another process finds the running script: by its name (`python -m`) or by its path."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return {"name": spec.name}
    path = main_path()
    return None if path is None else {"path": path}


def _function(factory: Any) -> Any:
    return _function(factory.func) if isinstance(factory, partial) else factory


def _module_name(factory: Any) -> str:
    function = _function(factory)
    return getattr(function, "__module__", None) or type(function).__module__


def can_be_found(name: str, file: str) -> bool:
    """Return whether a process that has not imported a module yet would import it, by its name, from this file."""
    parent, _, _ = name.rpartition(".")
    try:
        paths = list(importlib.import_module(parent).__path__) if parent else None
        spec = importlib.machinery.PathFinder.find_spec(name, paths)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file)
