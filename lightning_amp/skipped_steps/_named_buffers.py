"""Find the buffers that a skipped step restores, by the rules of `restore_buffers`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from lightning_amp._arguments import checked_rules
from lightning_amp._compat import _modules
from lightning_amp._text import listed


class BufferPlace(NamedTuple):
    """The place of a buffer: its module and its name there. The tensor may be replaced, or be `None`."""

    module: nn.Module
    name: str
    qualified: str

    def read(self) -> Tensor | None:
        """Return the buffer's present tensor."""
        return getattr(self.module, self.name, None)


def checked_buffer_rules(rules: Sequence[str]) -> tuple[str, ...]:
    """Return the rules as a tuple. Raise `ValueError` for anything but a sequence of globs."""
    legal = "globs on qualified buffer names, such as 'queue*' or '*.centre'"
    return checked_rules("restore_buffers", rules, legal, "queue*")


def norm_places(root: nn.Module) -> list[BufferPlace]:
    """Find all running statistics of normalisation layers."""
    norms = set(_modules.norm_modules(root))
    return [place for name, module in root.named_modules() if module in norms for place in _places(name, module)]


def matching_places(root: nn.Module, rules: Sequence[str]) -> list[BufferPlace]:
    """Find the buffers that the rules match, in the order of the modules, without statistics of normalisation layers.

    Raise `ValueError` with the closest names if a rule matches nothing.
    """
    if not rules:
        return []
    modules = root.named_modules(remove_duplicate=False)
    everywhere = [(_modules.plain_name(p.qualified), p) for name, module in modules for p in _places(name, module)]
    names = [name for name, _ in everywhere]
    for rule in rules:
        if not any(fnmatchcase(name, rule) for name in names):
            raise ValueError(
                f"`restore_buffers` has the rule {rule!r}, which matches no buffer. {_hint(rule, root, names)}"
            )
    norms = {(place.module, place.name) for place in norm_places(root)}
    found = {(p.module, p.name): p for name, p in everywhere if any(fnmatchcase(name, rule) for rule in rules)}
    return [place for key, place in found.items() if key not in norms]


def _places(prefix: str, module: nn.Module) -> list[BufferPlace]:
    return [BufferPlace(module, name, f"{prefix}.{name}".lstrip(".")) for name in _modules.buffer_names(module)]


def _hint(rule: str, root: nn.Module, names: list[str]) -> str:
    plain = [(prefix, *item) for prefix, module in root.named_modules() for item in vars(module).items()]
    others = [f"{prefix}.{name}".lstrip(".") for prefix, name, value in plain if isinstance(value, Tensor)]
    for name in map(_modules.plain_name, [*dict(root.named_parameters()), *others]):
        if fnmatchcase(name, rule):
            return f"`{name}` is no buffer: write `register_buffer({name.rpartition('.')[2]!r}, ...)`."
    close = difflib.get_close_matches(rule, names, n=5, cutoff=0.5)
    return f"{'Close to it' if close else 'There'} are: {listed([*map(repr, close or names)] or ['none'], most=5)}."
