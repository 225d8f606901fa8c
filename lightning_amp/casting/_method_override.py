"""Replace a method of a user's object for a while; copies and pickles of the object get the plain method."""

from __future__ import annotations

import copy
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from typing_extensions import override

from lightning_amp._compat import _modules


class InPlace(ABC):
    """Context that installs a replacement at its first entry and restores the original at its last exit."""

    _depth = 0

    @abstractmethod
    def install(self) -> None:
        """Install the replacement."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the original."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.install()

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.restore()


def not_run(overrides: Mapping[str, MethodOverride]) -> list[str]:
    """Name the overrides that provably have not run.

    Equal blocks share one compiled graph, in which only the first of them is seen: where `blocks.0.norm` was traced,
    `blocks.1.norm` may have run.
    """
    traced = {_kind(name, each) for name, each in overrides.items() if each.traced.is_set}
    return [n for n, each in overrides.items() if not each.ran.is_set and _kind(n, each) not in traced]


def _kind(name: str, method: MethodOverride) -> tuple[str, type]:
    return re.sub(r"\d+", "*", name), type(method.owner)


@functools.cache
def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that :meth:`MethodOverride.as_method` binds instead of `function`.

    It is always the same object.
    """

    def call(self: MethodOverride, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    functools.update_wrapper(call, function, updated=())
    call.__name__ = "__call__"  # a pickle looks up the plain method by this name
    return call


class MethodOverride(InPlace):
    """Replaces the method `name` of `owner`, as an attribute of that object, between `install` and `restore`.

    A deep copy of an attribute that is bound to its owner would go on calling the original, with the original's
    weights. So a deep copy of the owner gets the plain method, bound to the copy, or with `in_copies` an override of
    its own. A pickle gets the plain method, and loads without this package.
    """

    in_copies = False

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.ran, self.traced = _modules.Flag(), _modules.Flag()
        self.was_attribute = name in vars(owner)
        self._wrap(getattr(owner, name))

    def _wrap(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        # Signature and `__wrapped__`, which Lightning follows to see whether a hook is overridden. Other attributes are
        # not copied, because torch gives the attributes of a compiled function a meaning.
        functools.update_wrapper(self, inner, updated=())

    def note_call(self) -> None:
        """Record that the override has run, for :func:`not_run`."""
        self.ran.set()
        if torch.compiler.is_compiling():
            self.traced.set()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement of the method; the original method is `self.inner`."""

    @override
    def install(self) -> None:
        """Install the replacement, bypassing `__setattr__` of modules and metrics."""
        vars(self.owner)[self.name] = self.replacement

    @property
    def replacement(self) -> Callable[..., Any]:
        """Return the callable to install: the same object, or an equal one, each time."""
        return self

    def as_method(self) -> Callable[..., Any]:
        """Return a bound method that calls this, with the signature of the replaced one.

        Compiled modules need it, because `torch.compile` guards on the identity of a callable object. With such objects
        it would compile each of many equal blocks again, and from the ninth on none (`recompile_limit`).
        """
        function = getattr(self.inner, "__func__", None)
        return self.__call__ if function is None else MethodType(calling(function), self)

    @property
    def installed(self) -> bool:
        """Return whether the replacement is installed, and no other code has replaced it since."""
        return vars(self.owner).get(self.name) == self.replacement

    @override
    def restore(self) -> None:
        """Restore the original, unless other code has replaced our method since."""
        if self.installed:
            if self.was_attribute:
                vars(self.owner)[self.name] = self.inner
            else:
                del vars(self.owner)[self.name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # this object is an attribute, and `deepcopy` enters the owner's copy in the memo before it copies attributes
        owner = copy.deepcopy(self.owner, memo)
        inner = copy.deepcopy(self.inner, memo) if self.was_attribute else getattr(owner, self.name)
        if not self.in_copies:
            return inner
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), owner=owner, was_attribute=True)
        twin._wrap(inner)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # When the pickle is loaded, the owner exists but has no attributes yet, so `getattr` finds the plain method.
        return (copy.copy, (self.inner,)) if self.was_attribute else (getattr, (self.owner, self.name))
