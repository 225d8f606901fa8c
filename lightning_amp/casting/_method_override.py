"""Puts a function in the place of a user's method for a while; copies and pickles of the owner get the method."""

from __future__ import annotations

import copy
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from lightning_amp._compat import _modules


def not_run(overrides: Mapping[str, MethodOverride]) -> list[str]:
    """Name the overrides that have not run, as far as can be known.

    Blocks that are alike share one compiled graph, in which only the first of them is seen: where `blocks.0.norm` was
    traced, `blocks.1.norm` may have run.
    """
    traced = {_kind(name, override) for name, override in overrides.items() if override.traced.is_set}
    return [n for n, override in overrides.items() if not override.ran.is_set and _kind(n, override) not in traced]


def _kind(name: str, override: MethodOverride) -> tuple[str, type]:
    return re.sub(r"\d+", "*", name), type(override.owner)


@functools.cache
def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of what :meth:`MethodOverride.as_method` puts in the place of a method; one for each."""

    def call(self: MethodOverride, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    functools.update_wrapper(call, function, updated=())
    call.__name__ = "__call__"  # by which a pickle finds it on the plain method
    return call


class MethodOverride(ABC):
    """Replaces one method of one object, as an attribute of that object, between `install` and `restore`.

    An attribute that is bound to its owner is a trap in copies: a copied function would go on calling the original,
    with the original's weights. So a copy gets what :meth:`for_copy` returns, bound to the copy, and a pickle gets the
    plain method and does not need this package to load.

    Args:
        owner: Whose method; a module or a metric.
        name: Of the method.
        inner: What is replaced. Default: what `owner` has under that name now.

    """

    def __init__(self, owner: Any, name: str, inner: Callable[..., Any] | None = None) -> None:
        self.owner = owner
        self.name = name
        self.ran, self.traced = _modules.Flag(), _modules.Flag()
        self.was_attribute = name in vars(owner) if inner is None else True
        self.inner: Callable[..., Any] = getattr(owner, name) if inner is None else inner
        # Signature and `__wrapped__`, which Lightning follows to see whether a hook is overridden. Not the attributes:
        # those of a compiled function mean something to torch.
        functools.update_wrapper(self, self.inner, updated=())

    def note_call(self) -> None:
        """Note that it has run, for :func:`not_run`."""
        self.ran.set()
        if torch.compiler.is_compiling():
            self.traced.set()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the method now does; the replaced one is `self.inner`."""

    def install(self) -> None:
        """Install the replacement, bypassing `__setattr__` of modules and metrics."""
        vars(self.owner)[self.name] = self.replacement

    @property
    def replacement(self) -> Callable[..., Any]:
        """Return what is put there: the same object, or an equal one, each time."""
        return self

    def as_method(self) -> Callable[..., Any]:
        """Return a bound method that calls this, with the signature of the replaced one.

        For what is compiled: `torch.compile` guards on the identity of an object that is called, so that each of many
        equal blocks would be compiled anew, and from the ninth on (`recompile_limit`) not at all.
        """
        function = getattr(self.inner, "__func__", None)
        return self.__call__ if function is None else MethodType(calling(function), self)

    @property
    def installed(self) -> bool:
        """Return whether nobody has put something else there since."""
        return vars(self.owner).get(self.name) == self.replacement

    def restore(self) -> None:
        """Put back what was there. What somebody else put there in the meantime stays."""
        if self.installed:
            if self.was_attribute:
                vars(self.owner)[self.name] = self.inner
            else:
                del vars(self.owner)[self.name]

    def for_copy(self, owner: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a deep copy of the owner gets in this place: by default the method as it was."""
        return inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # `deepcopy` enters a new object in the memo before it copies the attributes, of which this is one
        owner = copy.deepcopy(self.owner, memo)
        inner = copy.deepcopy(self.inner, memo) if self.was_attribute else getattr(owner, self.name)
        return self.for_copy(owner, inner)

    def __reduce__(self) -> tuple[Any, ...]:
        # Likewise: when this is loaded, the owner exists and has no attributes yet, so `getattr` finds the method.
        return (copy.copy, (self.inner,)) if self.was_attribute else (getattr, (self.owner, self.name))
