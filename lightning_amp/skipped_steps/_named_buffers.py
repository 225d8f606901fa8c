"""Find the buffers that a skipped step restores, by the rules of `restore_buffers`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._arguments import checked_rules
from lightning_amp._compat import _modules
from lightning_amp._text import listed


@final
class BufferPlace:
    """The place of a buffer: its module and its name there. The tensor may be replaced, or be `None`."""

    def __init__(self, owner: nn.Module, name: str, qualified: str) -> None:
        self._owner = owner
        self._name = name
        self.qualified = qualified
        self.key = (id(owner), name)

    def read(self) -> Tensor | None:
        """Return the buffer's present tensor."""
        return getattr(self._owner, self._name, None)

    def write(self, value: Tensor | None) -> None:
        """Replace the buffer's tensor."""
        setattr(self._owner, self._name, value)


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
    everywhere = [
        (_modules.plain_name(place.qualified), place)
        for name, module in root.named_modules(remove_duplicate=False)
        for place in _places(name, module)
    ]
    names = [name for name, _ in everywhere]
    for rule in rules:
        if not any(fnmatchcase(name, rule) for name in names):
            raise ValueError(_nothing(rule, root, names))
    found = {place.key: place for name, place in everywhere if any(fnmatchcase(name, rule) for rule in rules)}
    for place in norm_places(root):
        found.pop(place.key, None)
    return list(found.values())


def _places(prefix: str, module: nn.Module) -> list[BufferPlace]:
    return [BufferPlace(module, name, f"{prefix}.{name}" if prefix else name) for name in _modules.buffer_names(module)]


def _nothing(rule: str, root: nn.Module, names: list[str]) -> str:
    text = f"`restore_buffers` has the rule {rule!r}, which matches no buffer"
    parameter = next((n for n, _ in root.named_parameters() if fnmatchcase(_modules.plain_name(n), rule)), None)
    if parameter is not None:
        return f"{text}. `{parameter}` is a parameter: what a step writes into by itself should be a buffer."
    plain = next((name for name in _plain_tensors(root) if fnmatchcase(name, rule)), None)
    if plain is not None:
        last = plain.rpartition(".")[2]
        return f"{text}. `{plain}` is a plain attribute: make it a buffer with `register_buffer({last!r}, ...)`."
    if not names:
        return f"{text}: the module has no buffers. Remove the rule, or `register_buffer` what it means."
    close = difflib.get_close_matches(rule, names, n=5, cutoff=0.5)
    return f"{text}. {'Close to it' if close else 'There'} are: {listed([*map(repr, close or names)], most=5)}."


def _plain_tensors(root: nn.Module) -> list[str]:
    return [
        _modules.plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
