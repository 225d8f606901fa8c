"""Which linear layers gain from fp8, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_amp._compat import _modules
from lightning_amp._text import counted, listed
from lightning_amp.casting._float8_recipes import emulates
from lightning_amp.casting._fp32_metrics import is_metric
from lightning_amp.casting._method_override import calling

_CONVERTED = "converted to fp8 by you already"
_FROZEN = "frozen; in fp8 from when it is not"


def linear_layers(root: nn.Module) -> dict[str, nn.Linear]:
    """Return each `nn.Linear` of a module under its first name, in registration order."""
    return {_modules.plain_name(n): m for n, m in root.named_modules() if isinstance(m, nn.Linear)}


def choose_fp8_layers(
    root: nn.Module, in_fp32: Collection[nn.Module], recipe: Any, device: torch.device
) -> dict[str, str | None]:
    """Choose the layers that run in fp8.

    Args:
        root: The module.
        in_fp32: Submodules that compute in fp32.
        recipe: A checked one: the products of some pay for the casts sooner than those of others.
        device: Where.

    Returns:
        For each `nn.Linear`, by its first name: `None`, or why it does not.

    """
    layers = linear_layers(root)
    inside_metrics = {m for metric in root.modules() if is_metric(metric) for m in metric.modules()}
    attention = {m.out_proj for m in root.modules() if isinstance(m, nn.MultiheadAttention)}
    ends = [layer for layer in layers.values() if layer not in inside_metrics]
    small = _too_small(recipe) if device.type == "cuda" and not emulates(recipe) else None

    def why_not(layer: nn.Linear) -> str | None:
        weight = vars(layer)["_parameters"].get("weight")
        if layer in inside_metrics:
            return "inside a metric"
        if layer in in_fp32:
            return "in `fp32_modules`"
        if _is_converted(layer):
            return _CONVERTED
        if layer in attention:
            return "`nn.MultiheadAttention` uses its weight and never calls it"
        if weight is None:
            return "its weight is computed from something else (a parametrization, pruning)"
        if not _is_plain(layer):
            return "its `forward` is not that of `nn.Linear`"
        if layer is ends[0]:
            return "the first linear layer"
        if layer is ends[-1]:
            return "the last linear layer"
        if is_lazy(weight):
            return "lazy: its size is not known when the fit begins"
        if weight.dtype != torch.float32:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        if layer.in_features % 16 or layer.out_features % 16 or not weight.numel():
            return f"{layer.in_features} x {layer.out_features}: not both are multiples of 16"
        if small is not None and small(layer.in_features, layer.out_features):
            return f"{layer.in_features} x {layer.out_features}: too small, casts would cost more than fp8 saves"
        return None if weight.requires_grad else _FROZEN

    return {name: why_not(layer) for name, layer in layers.items()}


def may_run_in_fp8(layers: Mapping[str, str | None]) -> set[str]:
    """Return the names of layers that run in fp8, or will when somebody unfreezes them."""
    return {name for name, why in layers.items() if why is None or why == _FROZEN}


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether its `forward` is that of `nn.Linear`; also in a copy that was made while it multiplied in fp8."""
    function = getattr(layer.forward, "__func__", None)
    return function is nn.Linear.forward or function is calling(nn.Linear.forward)


def _is_converted(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Float8Linear" or type(layer).__module__.startswith("transformer_engine")


def _too_small(recipe: Any) -> Callable[[int, int], bool]:
    """Return the rule of torchao's own filters, which were measured on an H100 (`_auto_filter_for_recipe`)."""

    def for_tensorwise(inputs: int, outputs: int) -> bool:
        return inputs <= 4096 and outputs <= 1024

    def for_rowwise(inputs: int, outputs: int) -> bool:
        return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)

    granularity = None if isinstance(recipe, str) else recipe.cast_config_weight.scaling_granularity.value
    return for_tensorwise if recipe == "tensorwise" or granularity == "tensorwise" else for_rowwise


def share_of_flops(root: nn.Module, layers: Mapping[str, str | None]) -> float:
    """Return how much of the work of all linear layers runs in fp8, if each sees as many rows as the others."""
    sizes = {name: layer.in_features * layer.out_features for name, layer in linear_layers(root).items()}
    return sum(sizes[n] for n, why in layers.items() if why is None) / max(1, sum(sizes[n] for n in layers))


def num_converted(root: nn.Module) -> int:
    """Count the layers that the user has converted to fp8."""
    return sum(1 for m in root.modules() if _is_converted(m) and hasattr(m, "weight"))


def nothing_qualifies(root: nn.Module, layers: Mapping[str, str | None]) -> str:
    """Write why no layer runs in fp8, the most frequent reason first, and what else computes linear maps."""
    reasons: dict[str, list[str]] = {}
    for name, why in layers.items():
        reasons.setdefault(str(why), []).append(f"`{name}`")
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = [f"  - {reason}: {listed(names)}" for reason, names in ordered[:8]]
    others = Counter(type(m).__name__ for m in root.modules() if _computes_a_linear_map(m))
    if others:
        found = listed([f"`{name}` ({count})" for name, count in others.most_common()])
        number = sum(others.values())
        verb = "multiplies" if number == 1 else "multiply"
        lines.append(f"  - {counted(number, 'layer')} that {verb} by a weight without being an `nn.Linear`: {found}")
    what = counted(len(layers), "linear layer")
    text = f"none of the {what} qualifies" if len(layers) > 1 else "the only linear layer does not qualify"
    title = f"precision 'fp8' has nothing to do here: {text if layers else 'there is no `nn.Linear`'}."
    return "\n".join([title, *lines])


def _computes_a_linear_map(module: nn.Module) -> bool:
    if isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return False
    own = module.named_parameters(recurse=False)
    return any("weight" in name and p.dim() == 2 and p.is_floating_point() and p.requires_grad for name, p in own)
