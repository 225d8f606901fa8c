"""Compute the modules that `fp32_modules` names in fp32, while the rest of the model runs under autocast."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from typing_extensions import final

from lightning_amp._arguments import no_match
from lightning_amp._compat import _modules
from lightning_amp.casting._fp32_metrics import is_metric
from lightning_amp.casting._fp32_region import InFp32
from lightning_amp.numerics import HALF_DTYPES

Rule = type[nn.Module] | str


def modules_matching(root: nn.Module, rules: Iterable[Rule]) -> dict[str, nn.Module]:
    """Return the modules that the rules match, each once, by the first name that a rule matches.

    The root never matches: precision 'fp32' computes all of it in fp32. A shared module matches under any of its names.
    A module without a `forward` (`nn.ModuleList`) stands for its children. A metric that matches is left out, because
    metrics compute in fp32 anyway. A rule that matches nothing raises a `ValueError` with the closest names.
    """
    # A compiled or sharded child has the same name as the module inside it, which comes later and replaces it in the
    # dictionary.
    names = {_modules.plain_name(name): module for name, module in root.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, str] = {}
    for rule in rules:
        if isinstance(rule, str):
            hits = [(name, module) for name, module in names.items() if fnmatchcase(name, rule)]
        else:
            hits = [(name, module) for name, module in names.items() if isinstance(module, rule)]
        if not hits:
            if isinstance(rule, str):
                raise no_match("fp32_modules", rule, "module", names)
            kinds = (type(module).__name__ for module in names.values())
            raise no_match("fp32_modules", rule.__name__, "module", kinds, "`{}`".format)
        for hit in hits:
            for name, module in _computing(*hit):
                found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def _computing(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if is_metric(module):
        return []
    if type(module).forward is not nn.Module.forward:
        return [(name, module)]
    return [pair for child_name, child in module.named_children() for pair in _computing(f"{name}.{child_name}", child)]


@final
class Fp32Modules:
    """Computes the modules of `root` that the rules match in fp32, and deep copies of them, until :meth:`remove`.

    Without `active` it only checks the rules. A rule that matches nothing, or a module with half-precision parameters,
    raises a `ValueError` before anything is changed.
    """

    def __init__(self, root: nn.Module, rules: Iterable[Rule], device_type: str, *, active: bool) -> None:
        rules = list(rules)
        found = modules_matching(root, rules)
        if not active:
            found = {}
        self._by_rule = [set(modules_matching(root, [rule]).values()) for rule in rules]
        self.modules = {inner for module in found.values() for inner in module.modules()}
        """All modules that compute in fp32, including the modules inside the matching ones."""
        for name, module in found.items():
            half = [f"`{name}.{n}` ({p.dtype})" for n, p in module.named_parameters() if p.dtype in HALF_DTYPES]
            if half:
                raise ValueError(
                    f"`fp32_modules` matches `{name}`, whose parameters are half precision: {', '.join(half[:3])}. They"
                    " cannot compute with float32 inputs. Call `.float()` on the module, pass `upcast_parameters=True`"
                    " to the plugin if it is trained, or take it out of the rules."
                )
        # averages and target networks, which are deep copies, compute in fp32 too
        self._forwards = {n: InFp32(m, "forward", device_type, in_copies=True) for n, m in found.items()}
        for forward in self._forwards.values():
            forward.install()

    def __len__(self) -> int:
        return len(self._forwards)

    def idle(self) -> tuple[list[str], bool]:
        """Name the modules that have not run, if no matching module inside or around them has run either.

        Also return whether some rule matches no other module, and so had no effect at all. Nothing is known if a module
        was compiled, because equal blocks may share its graph.
        """
        if any(forward.was_compiled.is_set for forward in self._forwards.values()):
            return [], False
        active = {m for forward in self._forwards.values() if forward.ran.is_set for m in forward.owner.modules()}
        idle = {name: f.owner for name, f in self._forwards.items() if active.isdisjoint(f.owner.modules())}
        return list(idle), any(matching and matching.issubset(idle.values()) for matching in self._by_rule)

    def remove(self) -> None:
        """Restore the modules to their earlier state."""
        for forward in self._forwards.values():
            forward.restore()
        self._forwards, self.modules = {}, set()
