"""The user's factories on their way into another process."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp.compare._describe import describe, short

_MOVE = (
    "Move it to the top level of a file, for example `models.py`, and pass `models.{name}`: each arm runs in a process"
    " of its own, which has to import it."
)


def check_factory(argument: str, factory: Any, kind: type) -> None:
    """Refuse what another process cannot import and call.

    Raises:
        ValueError: Saying how to write it instead.

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
    name = getattr(_function(factory), "__name__", type(factory).__name__)
    where = getattr(_function(factory), "__qualname__", "")
    if name == "<lambda>":
        raise ValueError(f"`{argument}` is a lambda, which another process cannot import. {_MOVE.format(name='make')}")
    if "<locals>" in where:
        text = f"`{argument}` is {where!r}, defined inside of a function, which another process cannot import."
        raise ValueError(f"{text} {_MOVE.format(name=name)}")
    if _module_name(factory) == "__main__" and _main_path() is None:
        text = f"`{argument}` is {name!r}, defined in a notebook or at a prompt, which another process cannot import."
        advice = _MOVE.format(name=name)
        raise ValueError(
            f"{text} {advice} In a notebook, `%%writefile models.py` as the first line of a cell does that."
        )
    _check_signature(argument, factory)
    try:
        pickle.loads(pickle.dumps(factory))
    except Exception as error:
        text = f"`{argument}` cannot be sent to another process: {type(error).__name__}: {error}."
        raise ValueError(f"{text} {_MOVE.format(name=name)}") from error


def _check_signature(argument: str, factory: Callable[..., Any]) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise ValueError(
            f"`{argument}` must be callable without arguments; {name!r}: {error}. Write a function that passes them:"
            f" `def make(): return {name}(...)`."
        ) from error
    except ValueError:  # a builtin without a signature
        pass


def factory_name(factory: Any) -> str:
    """Write which factory it is, the same in every process."""
    function = _function(factory)
    owner = getattr(factory, "__self__", None)
    if function is factory and hasattr(factory, "__qualname__") and (owner is None or isinstance(owner, type)):
        module = factory.__module__
        main = _main_path()
        return f"{Path(main).stem if module == '__main__' and main else module}.{factory.__qualname__}"
    return short(describe(factory))


def source_files(*factories: Any) -> dict[str, str]:
    """Return the file of each module that a factory is defined in, for a process that does not find it by its name."""
    files: dict[str, str] = {}
    for factory in factories:
        name = _module_name(getattr(factory, "__wrapped__", factory))
        file = getattr(sys.modules.get(name), "__file__", None)
        if name != "__main__" and file is not None:
            files[name] = str(Path(file).resolve())
    return files


def main_module() -> dict[str, str] | None:
    """Return where another process finds the running script: by its name (`python -m`) or by its path."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return {"name": spec.name}
    path = _main_path()
    return None if path is None else {"path": path}


def _main_path() -> str | None:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return str(Path(path).resolve()) if path and Path(path).is_file() else None


def _function(factory: Any) -> Any:
    return _function(factory.func) if isinstance(factory, partial) else factory


def _module_name(factory: Any) -> str:
    function = _function(factory)
    return getattr(function, "__module__", None) or type(function).__module__


def can_be_found(name: str, file: str) -> bool:
    """Return whether importing a module by its name, in a process that has not done so yet, finds this file."""
    parent, _, _ = name.rpartition(".")
    try:
        paths = list(importlib.import_module(parent).__path__) if parent else None
        spec = importlib.machinery.PathFinder.find_spec(name, paths)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file)
