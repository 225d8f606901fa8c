"""`fp32_modules`: parts of a model that compute in fp32 while the rest runs under autocast."""

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
    """Return the rules as a tuple.

    Raises:
        ValueError: For anything but a sequence of globs and module classes.

    """
    legal = "globs on qualified module names, such as 'decoder.head' or '*.norm', and subclasses of `torch.nn.Module`"
    return checked_rules("fp32_modules", rules, legal, "*.norm", nn.Module)


def modules_matching(root: nn.Module, rules: Iterable[Rule]) -> dict[Rule, list[tuple[str, nn.Module]]]:
    """Find for each rule the modules that it matches, by the first of their names over all rules.

    The root is no candidate: to compute all of it in fp32 there is precision 'fp32'. A shared module matches under any
    of its names. A module without a `forward` of its own (`nn.ModuleList`) stands for its children. Metrics count as
    matched and are left out: they compute in fp32 anyway.

    Raises:
        ValueError: If a rule matches nothing, with the closest names.

    """
    # A compiled or sharded child has the name of the module inside, which comes later and takes its place.
    names = {_modules.plain_name(name): module for name, module in root.named_modules(remove_duplicate=False) if name}
    first: dict[int, tuple[str, nn.Module]] = {}
    found: dict[Rule, list[tuple[str, nn.Module]]] = {}
    for rule in rules:
        hits = {name: module for name, module in names.items() if _hit(rule, name, module)}
        if not hits:
            raise ValueError(_nothing(rule, names))
        computing = [pair for hit, matched in hits.items() for pair in _computing(hit, matched)]
        found[rule] = [first.setdefault(id(module), (name, module)) for name, module in computing]
    return found


def _hit(rule: Rule, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else isinstance(module, rule)


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

    Its backward is fp32 too, since autograd computes in the dtypes of the forward. In the place of `forward` rather
    than in hooks around it, so that it also holds where somebody calls `module.forward(...)`, and so that switch and
    arithmetic are in one graph, whichever part of the model is compiled. A deep copy of the module (an average, a
    target network) computes in fp32 too.
    """

    def __init__(
        self,
        owner: nn.Module,
        device_type: str,
        inner: Callable[..., Any] | None = None,
        ran: _modules.Flag | None = None,
    ) -> None:
        super().__init__(owner, "forward", inner)
        self.device_type = device_type
        self.ran = ran or self.ran

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note_call()
        with torch.autocast(self.device_type, enabled=False):
            return self.inner(*to_fp32(args, HALF_DTYPES), **to_fp32(kwargs, HALF_DTYPES))

    @property
    @override
    def replacement(self) -> Callable[..., Any]:
        return self.as_method()

    @override
    def for_copy(self, owner: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        return _Fp32Forward(owner, self.device_type, inner, self.ran)


@final
class Fp32Modules:
    """The modules of one LightningModule that compute in fp32, until :meth:`remove`.

    Args:
        root: The module.
        rules: See `AmpPrecision`.
        device_type: Whose autocast to turn off.
        active: Whether there is an autocast to turn off at all. Rules are checked anyway.

    Raises:
        ValueError: If a rule matches nothing, or a module with half-precision parameters. Nothing is changed then.

    """

    def __init__(self, root: nn.Module, rules: Iterable[Rule], device_type: str, *, active: bool) -> None:
        by_rule = modules_matching(root, rules)
        found = dict(pair for pairs in by_rule.values() for pair in pairs)
        self._overrides: dict[str, _Fp32Forward] = {}
        self._rules: dict[Rule, list[str]] = {}
        self.modules: set[nn.Module] = set()
        """All modules that compute in fp32, those inside the matching ones included."""
        if not active:
            return
        for name, module in found.items():
            half = [f"`{name}.{n}` ({p.dtype})" for n, p in module.named_parameters() if p.dtype in HALF_DTYPES]
            if half:
                raise ValueError(
                    f"`fp32_modules` matches `{name}`, whose parameters are half precision: {', '.join(half[:3])}. They"
                    " cannot compute with float32 inputs: call `.float()` on the module, pass `upcast_parameters=True`"
                    " to the plugin if it is trained, or take it out of the rules."
                )
        self._rules = {rule: [name for name, _ in pairs] for rule, pairs in by_rule.items()}
        for name, module in found.items():
            forward = self._overrides[name] = _Fp32Forward(module, device_type)
            forward.install()
            self.modules.update(module.modules())

    def __len__(self) -> int:
        return len(self._overrides)

    def idle(self) -> tuple[dict[Rule, list[str]], list[str]]:
        """Find the modules that have not run, nor one around or inside them.

        Returns:
            By rule, those of rules for which this is so of all; and the others.

        """
        active: set[nn.Module] = set()
        waiting = set(not_run(self._overrides))
        running = [forward.owner for name, forward in self._overrides.items() if name not in waiting]
        for module in running:
            active.update(module.modules())
        idle = {n for n, f in self._overrides.items() if active.isdisjoint(f.owner.modules())}
        rules = {rule: names for rule, names in self._rules.items() if names and idle.issuperset(names)}
        return rules, sorted(idle.difference(*rules.values()))

    def has_children(self, name: str) -> bool:
        """Return whether a module that a rule matches has modules inside."""
        return any(True for _ in self._overrides[name].owner.children())

    def remove(self) -> None:
        """Leave the modules as they were."""
        for forward in self._overrides.values():
            forward.restore()
        self._overrides, self._rules, self.modules = {}, {}, set()
