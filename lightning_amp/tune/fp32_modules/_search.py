"""Search a tree of module names for a small set of modules that passes a test. Plain Python without torch."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from typing_extensions import final

Tree = Mapping[str, Sequence[str]]
"""The names of the nearest modules inside each module; the empty name has the modules at the top."""

_AT_LEAST = 60
_PER_LEVEL = 4


@final
class Found(NamedTuple):
    """The result of a search.

    Attributes:
        names: Modules that pass the test together; `None` if not even all modules pass.
        num_tried: Number of evaluated sets.
        complete: Whether no module can be left out. False if the budget of evaluations ran out before that was known.

    """

    names: tuple[str, ...] | None
    num_tried: int
    complete: bool


def search(
    tree: Tree, passes: Callable[[tuple[str, ...]], bool], suspicion: Mapping[str, float], most: int | None = None
) -> Found:
    """Find few and small modules that pass together.

    The search begins with all modules at the top. It leaves out halves of them, the least suspicious modules first,
    while the rest passes (delta debugging, Zeller and Hildebrandt 2002). It then replaces each module by the modules
    inside it if they pass, and so on down the tree. This is hierarchical delta debugging (Misherghi and Su 2006).
    Modules whose names differ only in numbers, such as the blocks of a transformer, are replaced together and separated
    at the end. If k of n modules are needed, this takes about 2k log2(n) evaluations. At the end it tries to leave out
    each module once more: it may have been needed only because of a module that was left out later.

    Args:
        tree: The modules.
        passes: Returns whether it is enough to have these modules, and all modules inside them, in fp32. It is called
            once per set.
        suspicion: Ratings by name; a higher one is more suspicious. A module without a rating is not suspicious.
        most: Largest number of evaluations. Default: 60, and 4 for each doubling of the number of modules.

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
        """Leave out as many modules of a group as possible."""
        rest = [name for name in kept if name not in group]
        if self._passes(rest):
            return rest
        if len(group) == 1:
            return kept
        half = (len(group) + 1) // 2
        return self._without(group[half:], self._without(group[:half], kept))

    def _inside(self, kept: list[str]) -> list[str]:
        """Replace modules by some of the modules inside them, down the tree while the set passes."""
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
        """Iterate over the replacements of a module, or of several similar modules; larger replacements come last."""
        names = self._single([name])
        parts = self._together(part for one in names for part in self._tree.get(one, ()))
        if parts:
            yield [*parts, *(one for one in names if not self._tree.get(one))]
        if len(names) > 1:
            yield names

    def _together(self, names: Iterable[str]) -> list[str]:
        """Replace similar modules by their pattern if all modules of the pattern are given."""
        given = list(dict.fromkeys(names))
        pattern_of = {
            name: pattern for pattern, alike in self._alike.items() if set(alike) <= set(given) for name in alike
        }
        return list(dict.fromkeys(pattern_of.get(name, name) for name in given))

    def _single(self, names: Iterable[str]) -> list[str]:
        """Replace patterns by their modules."""
        return list(dict.fromkeys(one for name in names for one in self._alike.get(name, (name,))))

    def _one_by_one(self, kept: list[str]) -> list[str]:
        """Leave out single modules until none can be left out."""
        for name in self._least_first(kept):
            rest = [other for other in kept if other != name]
            if self._passes(rest):
                return self._one_by_one(rest)
        return kept

    def _merged(self, kept: list[str]) -> list[str]:
        """Replace two or more modules by the module around them if it contains no other modules."""
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
    """Group two or more modules whose names differ only in numbers, by the name with a star for each number.

    The modules inside them must have the same names, because numbered layers may be of different kinds. If several
    groups share a pattern, the largest group gets the pattern.
    """
    groups: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for name in (name for inside in tree.values() for name in inside):
        within = tuple(sorted(child.removeprefix(f"{name}.") for child in tree.get(name, ())))
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault(pattern, {}).setdefault(within, []).append(name)
    largest = {pattern: max(same.values(), key=len) for pattern, same in groups.items()}
    return {pattern: tuple(names) for pattern, names in largest.items() if len(names) > 1}


def as_rules(names: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
    """Write names as rules; three or more names that differ in one number become a pattern.

    Args:
        names: Names of modules; the modules inside them are in fp32, too.
        others: The names of all other modules, none of which a pattern may match.

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
