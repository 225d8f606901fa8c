"""Put stand-ins, in a copy of a module, where objects cannot be copied: open files, generators, threads.

A step of the copy that uses a stand-in raises, because it could change the original. Hooks may use the real object: a
copy without its hooks, for example without a profiler that writes to a file, would not compute the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import final


@final
class NotCopiedError(RuntimeError):
    """A copy of a module used an object that could not be copied."""


@final
class Permission:
    """Whether the objects that could not be copied may be used now: only while a hook runs."""

    def __init__(self) -> None:
        self.granted = False

    def grant_to_hooks(self, modules: Iterable[dict[str, Any]]) -> None:
        """Let the hooks of copied modules, given by their attributes, use the objects that could not be copied."""
        for attributes in modules:
            for name, hooks in attributes.items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    hooks.update({key: self._granted_to(hook) for key, hook in hooks.items() if callable(hook)})

    def _granted_to(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def permitted(*args: Any, **kwargs: Any) -> Any:
            before, self.granted = self.granted, True
            try:
                return hook(*args, **kwargs)
            finally:
                self.granted = before

        return permitted


def _forward(operation: Callable[..., Any]) -> Any:
    def use(self: NotCopied, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        if not own["permission"].granted:
            raise NotCopiedError(own["message"])
        return operation(own["original"], *args, **kwargs)

    return use


@final
class NotCopied:
    """Raises when it is used. While a hook runs, it passes everything on to the original."""

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
