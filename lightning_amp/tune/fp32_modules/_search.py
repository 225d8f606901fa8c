"""The search for a small set of modules over a tree of names: it knows no torch, only which sets pass."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from typing_extensions import final

Tree = Mapping[str, Sequence[str]]
"""By name of a module, the nearest ones inside it; those at the top under the empty name."""

_AT_LEAST = 60
_PER_LEVEL = 4


@final
class Found(NamedTuple):
    """What a search ended with.

    Attributes:
        names: Modules that pass together; `None` if not even all of them do.
        num_tried: How many sets were evaluated.
        complete: Whether the search came to its end: then no module can be left out. Else there was no more budget.

    """

    names: tuple[str, ...] | None
    num_tried: int
    complete: bool


def search(
    tree: Tree, passes: Callable[[tuple[str, ...]], bool], suspicion: Mapping[str, float], most: int | None = None
) -> Found:
    """Find few and small modules that pass together.

    From all modules at the top, halves are left out as long as what is left passes (delta debugging, Zeller and
    Hildebrandt 2002), those first that are least suspicious. What cannot be left out is replaced by what is inside it,
    if that passes, and so on down the tree (hierarchical delta debugging, Misherghi and Su 2006). Modules that differ
    in numbers alone, such as the blocks of a transformer, go down together, and are told apart at the end. With k
    culprits among n modules that takes about 2k log2(n) evaluations. At last all are tried once more, one by one: where
    sets do not behave (a larger one fails), what was needed before may not be now.

    Args:
        tree: Of modules.
        passes: Tells whether it is enough that these, with all that is inside them, are in fp32. Called once per set.
        suspicion: By name; the highest first. A module without is not suspicious.
        most: Evaluations. Default: 60 and some for each doubling of the number of modules.

    """
    budget = most if most is not None else _AT_LEAST + _PER_LEVEL * math.ceil(math.log2(len(tree) + 1))
    return _Search(tree, passes, suspicion, budget).run()


@final
class _Search:
    """One search in progress."""

    def __init__(
        self, tree: Tree, passes: Callable[[tuple[str, ...]], bool], suspicion: Mapping[str, float], budget: int
    ) -> None:
        self._tree, self._ask, self._budget = tree, passes, budget
        self._alike = _alike(tree)
        self._suspicion = {**suspicion}
        for pattern, names in self._alike.items():
            self._suspicion[pattern] = max(suspicion.get(name, -math.inf) for name in names)
        self._known: dict[frozenset[str], bool] = {}
        self._refused = False

    def run(self) -> Found:
        top = self._together(self._tree.get("", ()))
        if self._passes([]):
            return self._found([])
        if not self._passes(top):
            return Found(None, len(self._known), complete=True)
        kept = self._without(self._least_first(top), top)
        kept = self._single(self._inside(kept))
        kept = self._one_by_one(kept)
        return self._found(self._merged(kept))

    def _found(self, kept: Sequence[str]) -> Found:
        return Found(tuple(kept), len(self._known), complete=not self._refused)

    def _passes(self, kept: Collection[str]) -> bool:
        single = self._single(kept)
        key = frozenset(single)
        if key not in self._known:
            if len(self._known) >= self._budget:
                self._refused = True
                return False
            self._known[key] = self._ask(tuple(single))
        return self._known[key]

    def _least_first(self, names: Collection[str]) -> list[str]:
        return sorted(names, key=lambda name: self._suspicion.get(name, -math.inf))

    def _without(self, group: Sequence[str], kept: list[str]) -> list[str]:
        """Leave out as many of a group as can be."""
        rest = [name for name in kept if name not in group]
        if self._passes(rest):
            return rest
        if len(group) == 1:
            return kept
        half = (len(group) + 1) // 2
        return self._without(group[half:], self._without(group[:half], kept))

    def _inside(self, kept: list[str]) -> list[str]:
        """Replace modules by some of those inside, as far down as that passes."""
        waiting = list(kept)
        while waiting:
            name = waiting.pop(0)
            place = kept.index(name)
            for parts in self._parts(name):
                replaced = [*kept[:place], *parts, *kept[place + 1 :]]
                if self._passes(replaced):
                    kept = self._without(self._least_first(parts), replaced)
                    waiting += [part for part in parts if part in kept]
                    break
        return kept

    def _parts(self, name: str) -> Iterator[list[str]]:
        """Iterate over what a module, or several that are alike, can be replaced by: the larger parts last."""
        names = self._single([name])
        parts = self._together(part for one in names for part in self._tree.get(one, ()))
        if parts:
            yield [*parts, *(one for one in names if not self._tree.get(one))]
        if len(names) > 1:
            yield names

    def _together(self, names: Iterable[str]) -> list[str]:
        """Write modules that are alike as their pattern, where all that it stands for are there."""
        given = list(dict.fromkeys(names))
        pattern_of = {
            name: pattern for pattern, alike in self._alike.items() if set(alike) <= set(given) for name in alike
        }
        return list(dict.fromkeys(pattern_of.get(name, name) for name in given))

    def _single(self, names: Iterable[str]) -> list[str]:
        """Write a pattern as the modules that it stands for."""
        return list(dict.fromkeys(one for name in names for one in self._alike.get(name, (name,))))

    def _one_by_one(self, kept: list[str]) -> list[str]:
        """Leave out single modules until none can be."""
        for name in self._least_first(kept):
            rest = [other for other in kept if other != name]
            if self._passes(rest):
                return self._one_by_one(rest)
        return kept

    def _merged(self, kept: list[str]) -> list[str]:
        """Write one name for a module of whose inside everything is needed, if it is more than one."""
        for name in sorted(self._tree, key=lambda name: -name.count(".")):
            children = self._tree[name]
            if name and len(children) > 1 and set(children) <= set(kept):
                place = kept.index(next(other for other in kept if other in children))
                merged = [other for other in kept if other not in children]
                merged.insert(min(place, len(merged)), name)
                if self._passes(merged):
                    kept = merged
        return kept


def _alike(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Find modules whose names differ in numbers alone, two or more; by name with a star for each number.

    With the same names inside: layers of different kinds that are numbered are not alike. Of several such groups the
    largest has the pattern.
    """
    groups: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for name in (name for inside in tree.values() for name in inside):
        within = tuple(sorted(child.removeprefix(f"{name}.") for child in tree.get(name, ())))
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault(pattern, {}).setdefault(within, []).append(name)
    largest = {pattern: max(same.values(), key=len) for pattern, same in groups.items()}
    return {pattern: tuple(names) for pattern, names in largest.items() if len(names) > 1}


def as_rules(names: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
    """Write names as rules: three or more that differ in one number as a pattern, if that matches none of the others.

    Args:
        names: Of modules; what stands inside of one is in fp32 with it.
        others: The names of all other modules.

    """
    left, rules = list(names), list[str]()
    for name in names:
        if name not in left:
            continue
        for match in re.finditer(r"(?<=\.)\d+(?=\.|$)", name):
            before, after = glob.escape(name[: match.start()]), glob.escape(name[match.end() :])
            pattern = f"{before}*{after}"
            alike = [other for other in left if fnmatchcase(other, pattern)]
            inside = tuple(f"{other}." for other in alike)
            too_many = any(fnmatchcase(other, pattern) and not other.startswith(inside) for other in others)
            if len(alike) > 2 and not too_many:
                left = [other for other in left if other not in alike]
                rules.append(pattern)
                break
        else:
            rules.append(glob.escape(name))
    return tuple(rules)
