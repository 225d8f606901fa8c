"""What stands in a copy of a module for an object that cannot be copied: an open file, a generator, a thread.

Steps of the copy must not use it: sharing it would let the copy change the original. Hooks may, because without them
(a profiler's, a recorder's with its file) the copy would not compute what the original computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from typing_extensions import final


@final
class NotCopiedError(RuntimeError):
    """A copy of a module used something that could not be copied."""


@final
class Permission:
    """To use what could not be copied, for hooks of a copy as long as they run."""

    def __init__(self) -> None:
        self.granted = False

    @contextmanager
    def grant(self) -> Generator[None]:
        """Grant it for the length of a hook."""
        before, self.granted = self.granted, True
        try:
            yield
        finally:
            self.granted = before


def _forward(operation: Callable[..., Any]) -> Any:
    def use(self: NotCopied, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        if not own["permission"].granted:
            raise NotCopiedError(own["message"])
        return operation(own["original"], *args, **kwargs)

    return use


@final
class NotCopied:
    """Says so when it is used. While a hook runs, it passes everything on to the original."""

    def __init__(self, path: str, original: Any, permission: Permission) -> None:
        kind = type(original)
        message = (
            f"`{path}` cannot be copied (`{kind.__module__}.{kind.__qualname__}`), so a copy of the module must not use"
            " it. If sharing it is harmless, give it a `__deepcopy__` method that returns `self`"
        )
        vars(self).update(message=message, original=original, permission=permission)

    __getattr__ = _forward(getattr)
    __setattr__ = _forward(setattr)
    __call__ = _forward(lambda original, *args, **kwargs: original(*args, **kwargs))
    __iter__ = _forward(iter)
    __next__ = _forward(next)
    __len__ = _forward(len)
    __bool__ = _forward(bool)
    __getitem__ = _forward(operator.getitem)
    __setitem__ = _forward(operator.setitem)
    __contains__ = _forward(operator.contains)
    __enter__ = _forward(lambda original: original.__enter__())
    __exit__ = _forward(lambda original, *error: original.__exit__(*error))

    def __deepcopy__(self, memo: dict[int, Any]) -> NotCopied:
        return self


@final
class PermittedHook:
    """A hook of a copy."""

    def __init__(self, hook: Callable[..., Any], permission: Permission) -> None:
        self._hook, self._permission = hook, permission

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._permission.grant():
            return self._hook(*args, **kwargs)
