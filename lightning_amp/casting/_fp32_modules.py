"""Compute the modules that `fp32_modules` names in fp32, while the rest of the model runs under autocast."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from typing_extensions import final, override

from lightning_amp._arguments import checked_rules
from lightning_amp._compat import _modules
from lightning_amp._containers import to_fp32
from lightning_amp._text import listed
from lightning_amp.casting._fp32_metrics import is_metric
from lightning_amp.casting._method_override import MethodOverride, not_run
from lightning_amp.numerics import HALF_DTYPES

Rule = type[nn.Module] | str


def checked_module_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules as a tuple; raise an error unless they are a sequence of globs and module classes."""
    legal = "globs on qualified module names, such as 'decoder.head' or '*.norm', and subclasses of `torch.nn.Module`"
    return checked_rules("fp32_modules", rules, legal, "*.norm", nn.Module)


def modules_matching(root: nn.Module, rules: Iterable[Rule]) -> dict[Rule, list[tuple[str, nn.Module]]]:
    """Return for each rule the modules that it matches, each with the first name by which any rule matched it.

    The root never matches: precision 'fp32' computes all of it in fp32. A shared module matches under any of its names.
    A module without a `forward` (`nn.ModuleList`) stands for its children. A metric that matches is left out, because
    metrics compute in fp32 anyway. A rule that matches nothing raises a `ValueError` with the closest names.
    """
    # A compiled or sharded child has the same name as the module inside it, which comes later and replaces it in the
    # dictionary.
    names = {_modules.plain_name(name): module for name, module in root.named_modules(remove_duplicate=False) if name}
    first: dict[int, tuple[str, nn.Module]] = {}
    found: dict[Rule, list[tuple[str, nn.Module]]] = {}
    for rule in rules:
        if isinstance(rule, str):
            hits = [(name, module) for name, module in names.items() if fnmatchcase(name, rule)]
        else:
            hits = [(name, module) for name, module in names.items() if isinstance(module, rule)]
        if not hits:
            raise ValueError(_nothing(rule, names))
        computing = [pair for hit in hits for pair in _computing(*hit)]
        found[rule] = [first.setdefault(id(module), (name, module)) for name, module in computing]
    return found


def _computing(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if is_metric(module):
        return []
    if type(module).forward is not nn.Module.forward:
        return [(name, module)]
    return [pair for child_name, child in module.named_children() for pair in _computing(f"{name}.{child_name}", child)]


def _nothing(rule: Rule, names: dict[str, nn.Module]) -> str:
    if isinstance(rule, str):
        close = difflib.get_close_matches(rule, names, n=3, cutoff=0.4)
        last = rule.rpartition(".")[2].strip("*")
        close += [name for name in names if last and last in name and name not in close]
        what = f"{rule!r}, which matches no module"
        candidates = [repr(name) for name in close or names]
    else:
        classes = list(dict.fromkeys(type(module).__name__ for module in names.values()))
        close = difflib.get_close_matches(rule.__name__, classes, n=3, cutoff=0.4)
        what = f"{rule.__name__}, and no module is one"
        candidates = [f"`{name}`" for name in close or classes]
    if not candidates:
        return f"`fp32_modules` has the rule {what}: the module has no submodules. Remove the rule."
    where = "Close to it" if close else "There"
    return f"`fp32_modules` has the rule {what}. {where} are: {listed(candidates, most=5)}."


@final
class _Fp32Forward(MethodOverride):
    """The `forward` of a module, in fp32: autocast off, half-precision arguments upcast.

    Its backward is fp32 too, since autograd computes in the dtypes of the forward. It replaces `forward` instead of
    being a pair of hooks. So a direct call of `module.forward(...)` is in fp32 too, and a compiler traces the switch of
    autocast and the arithmetic into one graph. A deep copy of the module (an average, a target network) computes in
    fp32 too.
    """

    in_copies = True

    def __init__(self, owner: nn.Module, device_type: str) -> None:
        super().__init__(owner, "forward")
        self.device_type = device_type

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note_call()
        with torch.autocast(self.device_type, enabled=False):
            return self.inner(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))

    @property
    @override
    def replacement(self) -> Callable[..., Any]:
        return self.as_method()


@final
class Fp32Modules:
    """Computes the modules of `root` that the rules match in fp32, until :meth:`remove`.

    Without `active` it only checks the rules. A rule that matches nothing, or a module with half-precision parameters,
    raises a `ValueError` before anything is changed.
    """

    def __init__(self, root: nn.Module, rules: Iterable[Rule], device_type: str, *, active: bool) -> None:
        by_rule = modules_matching(root, rules)
        found = dict(pair for pairs in by_rule.values() for pair in pairs) if active else {}
        self._overrides: dict[str, _Fp32Forward] = {}
        self._rules = {rule: [name for name, _ in pairs] for rule, pairs in by_rule.items()}
        self.modules: set[nn.Module] = set()
        """All modules that compute in fp32, including the modules inside the matching ones."""
        for name, module in found.items():
            half = [f"`{name}.{n}` ({p.dtype})" for n, p in module.named_parameters() if p.dtype in HALF_DTYPES]
            if half:
                raise ValueError(
                    f"`fp32_modules` matches `{name}`, whose parameters are half precision: {', '.join(half[:3])}. They"
                    " cannot compute with float32 inputs. Call `.float()` on the module, pass `upcast_parameters=True`"
                    " to the plugin if it is trained, or take it out of the rules."
                )
        for name, module in found.items():
            forward = self._overrides[name] = _Fp32Forward(module, device_type)
            forward.install()
            self.modules.update(module.modules())

    def __len__(self) -> int:
        return len(self._overrides)

    def idle(self) -> tuple[dict[Rule, list[str]], list[str]]:
        """Return the names of modules that have not run, if no module inside or around them has run either.

        First come the names by rule, for rules of which no module ran; then come the names of all other modules that
        did not run.
        """
        waiting = set(not_run(self._overrides))
        running = [forward.owner for name, forward in self._overrides.items() if name not in waiting]
        active = {inner for module in running for inner in module.modules()}
        idle = {n for n, f in self._overrides.items() if active.isdisjoint(f.owner.modules())}
        rules = {rule: names for rule, names in self._rules.items() if names and idle.issuperset(names)}
        return rules, sorted(idle.difference(*rules.values()))

    def has_children(self, name: str) -> bool:
        """Return whether the module of this name has modules inside."""
        return any(True for _ in self._overrides[name].owner.children())

    def remove(self) -> None:
        """Restore the modules to their earlier state."""
        for forward in self._overrides.values():
            forward.restore()
        self._overrides, self.modules = {}, set()
