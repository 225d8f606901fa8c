"""Replace a method of a user's object for a while; copies and pickles of the object get the plain method."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from typing_extensions import final


@functools.cache
def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a :class:`MethodOverride` binds instead of `function`: always the same object."""

    def call(self: MethodOverride, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    functools.update_wrapper(call, function, updated=())
    call.__name__ = "__call__"  # a pickle looks up the plain method by this name
    return call


class MethodOverride(ABC):
    """Replaces the method `name` of `owner`, as an attribute of that object, between `install` and `restore`.

    A deep copy of an attribute that is bound to its owner would go on calling the original, with the original's
    weights. So a deep copy of the owner gets the plain method, bound to the copy, or with `in_copies` an override of
    its own. A pickle gets the plain method, and loads without this package.
    """

    in_copies = False

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.was_attribute = name in vars(owner)
        self._wrap(getattr(owner, name))

    def _wrap(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self._function = calling(inner.__func__) if isinstance(inner, MethodType) else None
        # Signature and `__wrapped__`, which Lightning follows to see whether a hook is overridden. Other attributes are
        # not copied, because torch gives the attributes of a compiled function a meaning.
        functools.update_wrapper(self, inner, updated=())

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement of the method; the original method is `self.inner`."""

    @property
    def installed(self) -> bool:
        """Return whether the replacement is installed, and no other code has replaced it since."""
        found = vars(self.owner).get(self.name)
        return getattr(found, "__self__", found) is self

    def install(self) -> None:
        """Install the replacement, bypassing `__setattr__` of modules and metrics.

        The replacement of a bound method is a bound method. `torch.compile` guards on the identity of other callable
        objects, and would compile each of many equal blocks again, and from the ninth on none (`recompile_limit`).
        """
        vars(self.owner)[self.name] = self if self._function is None else MethodType(self._function, self)

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


@final
class Overrides:
    """Context in which overrides are installed. It may be entered inside of itself."""

    def __init__(self, overrides: Iterable[MethodOverride]) -> None:
        self._overrides = list(overrides)
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            for each in self._overrides:
                each.install()

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            for each in self._overrides:
                each.restore()
