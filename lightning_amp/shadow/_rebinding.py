"""Rebind functions that a copied module keeps, above all its hooks, because they close over the original."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

from typing_extensions import final

MAPPINGS: tuple[type, ...] = (dict, OrderedDict, defaultdict)
_FUNCTIONS: tuple[type, ...] = (types.FunctionType, functools.partial)
_EMPTY = object()


def rebind_closures(modules: Iterable[dict[str, Any]], memo: dict[int, Any]) -> None:
    """Make the functions that copied modules keep close over the copies.

    `copy.deepcopy` does not copy functions, so a hook `lambda *_: self.seen.append(1)` would write to the
    original.

    Args:
        modules: The attributes of each copy.
        memo: The memo of `copy.deepcopy`: by `id`, the object that replaces another in the copy.
    """
    rebinding = _Rebinding(memo)
    for attributes in modules:
        for name, item in list(attributes.items()):
            if isinstance(item, _FUNCTIONS):
                attributes[name] = rebinding.counterpart(item)
            elif type(item) in MAPPINGS:
                for key, function in list(item.items()):
                    if isinstance(function, _FUNCTIONS):
                        item[key] = rebinding.counterpart(function)


@final
class _Rebinding:
    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._under_way: set[int] = set()

    def counterpart(self, item: Any) -> Any:
        """Return the replacement of an object that a function closes over; the same object if there is none."""
        if id(item) in self._memo:
            return self._memo[id(item)]
        if isinstance(item, types.MethodType):  # `torch.compile(self.encode)` closes over a bound method
            owner = self.counterpart(item.__self__)
            return item if owner is item.__self__ else types.MethodType(item.__func__, owner)
        if isinstance(item, functools.partial):
            return functools.partial(
                self.counterpart(item.func),
                *map(self.counterpart, item.args),
                **{key: self.counterpart(value) for key, value in item.keywords.items()},
            )
        if isinstance(item, types.FunctionType) and id(item) not in self._under_way:
            self._under_way.add(id(item))  # a function may close over itself
            result = self._rebound(item)
            self._under_way.discard(id(item))
            return result
        return item

    def _rebound(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        contents = [_cell_contents(cell) for cell in cells]
        own = [self.counterpart(item) for item in contents]
        if all(new is item for new, item in zip(own, contents, strict=True)):
            return function
        closure = tuple(
            cell if new is item else types.CellType(new) for cell, new, item in zip(cells, own, contents, strict=True)
        )
        code, name, defaults = function.__code__, function.__name__, function.__defaults__
        result = types.FunctionType(code, function.__globals__, name, defaults, closure)
        result.__kwdefaults__ = function.__kwdefaults__
        vars(result).update(vars(function))
        return result


def _cell_contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is assigned later, or never
        return _EMPTY
