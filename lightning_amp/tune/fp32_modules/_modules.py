"""Record which modules run in a step and how far their outputs are from fp32, and arrange them as a tree."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp.casting import MethodOverride, is_metric
from lightning_amp.numerics import HALF_DTYPES, fidelity, fidelity_sums
from lightning_amp.tune.fp32_modules._search import Tree

_NOT_FINITE_DB = 300.0


def names_of(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside by the first of their names, which the rules of `fp32_modules` match.

    It leaves out metrics, which compute in fp32 anyway, and TorchScript modules, whose submodules cannot be changed.
    """
    by_module: dict[nn.Module, str] = {}
    closed: set[nn.Module] = set()
    for name, module in root.named_modules(remove_duplicate=False):
        if module in closed or module is root:
            continue
        if is_metric(module) or isinstance(module, torch.jit.ScriptModule):
            closed.update(module.modules())
        else:
            by_module.setdefault(module, _modules.plain_name(name))
    return {name: module for module, name in by_module.items()}


def make_tree(root: nn.Module, called: Collection[str], left_out: frozenset[str] = frozenset()) -> Tree:
    """Return the tree of the modules that are called and that can be kept in fp32.

    A module that is never called (`nn.ModuleList`, an encoder with only an `encode` method) has no forward to override.
    The modules inside it take its place. The same holds for a module with half-precision parameters. Modules
    in `left_out`, and the modules inside them, are in fp32 anyway.
    """
    inside: dict[str, list[str]] = {"": []}
    for name, module in names_of(root).items():
        outer = _outer_names(name)
        if name not in called or name in left_out or not left_out.isdisjoint(outer):
            continue
        if any(parameter.dtype in HALF_DTYPES for parameter in module.parameters()):
            continue
        inside[next((other for other in outer if other in inside), "")].append(name)
        inside[name] = []
    return inside


def _outer_names(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


@final
class Watch:
    """The outputs of the modules in a step, from the first call of each.

    Args:
        reference: The watch of the same step in fp32, whose outputs are compared. Without it, outputs are kept.

    Attributes:
        called: Names of the modules that ran, in the order in which their calls ended.
        outputs: Copies of floating-point outputs, without `reference`. They take as much memory as the activations.
        sums: With `reference`, :func:`~lightning_amp.numerics.fidelity_sums` of the outputs of each module.

    """

    def __init__(self, reference: Watch | None = None) -> None:
        self._reference = reference
        self.called: list[str] = []
        self.outputs: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    @contextmanager
    def on(self, root: nn.Module) -> Generator[None]:
        """Watch the modules inside `root`."""
        watched = [_Watched(module, name, self) for name, module in names_of(root).items()]
        for one in watched:
            one.install()
        try:
            yield
        finally:
            for one in watched:
                one.restore()

    @torch.no_grad()
    def saw(self, name: str, output: Any) -> None:
        """Keep or compare the outputs of a module's first call."""
        if name in self.called:
            return
        self.called.append(name)
        found = [t for _, t in tensors_in(output) if t.is_floating_point() and t.layout is torch.strided]
        if self._reference is None:
            self.outputs[name] = [tensor.detach().clone() for tensor in found]
            return
        pairs = list(zip(self._reference.outputs.get(name, []), found, strict=False))
        if pairs and all(reference.shape == tensor.shape for reference, tensor in pairs):
            self.sums[name] = torch.stack([fidelity_sums(r, t) for r, t in pairs]).sum(0)

    def forget(self) -> None:
        """Free the outputs."""
        self.outputs.clear()


@final
class _Watched(MethodOverride):
    """The `forward` of a module, which also passes its output to a watch."""

    def __init__(self, owner: nn.Module, name: str, watch: Watch) -> None:
        super().__init__(owner, "forward")
        self._name_of_module, self._watch = name, watch

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        self._watch.saw(self._name_of_module, output)
        return output


def suspicion(
    tree: Tree, called: Iterable[str], outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Rate modules by their error in half precision: noise over signal in dB, the mean of output and gradient.

    Values that are not finite rate highest; among equal modules, the module that ran first rates higher.

    Args:
        tree: The modules to rate.
        called: Names of modules in the order in which their calls ended.
        outputs: Fidelity sums by module.
        gradients: Fidelity sums by parameter.

    """
    order = {name: number for number, name in enumerate(called)}
    rated: dict[str, float] = {}
    inside: dict[str, Tensor] = {}
    for name, sums in gradients.items():
        for outer in _outer_names(name):
            if outer in tree:
                inside[outer] = inside[outer] + sums if outer in inside else sums
    for name in (name for name in tree if name):
        noise = [_noise_db(sums[name]) for sums in (outputs, inside) if name in sums]
        # the module to blame has both a bad output and a bad gradient; modules before it have only bad gradients,
        # modules after it only bad outputs
        rated[name] = sum(noise) / len(noise) - 1e-6 * order.get(name, 0) if noise else -math.inf
    return rated


def _noise_db(sums: Tensor) -> float:
    decibels = float(fidelity(sums)[0])
    return _NOT_FINITE_DB if math.isnan(decibels) else -decibels
