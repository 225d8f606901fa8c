"""fp8: check the recipe, choose the linear layers that gain, and multiply in 8 bits there while a model trains.

A recipe defines how values are scaled before they are rounded to 8 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torchao
from lightning_amp._text import counted, listed, literal, percent
from lightning_amp.casting._fp32_metrics import is_metric
from lightning_amp.casting._method_override import MethodOverride, Overrides, calling

DEFAULT_RECIPE = "rowwise_with_gw_hp"
RECIPES = (DEFAULT_RECIPE, "rowwise", "tensorwise")


def checked_recipe(recipe: Any) -> Any:
    """Return the name of a recipe, or a `torchao.float8.Float8LinearConfig` unchanged; refuse everything else.

    A configuration that changes the class of the parameters is refused too.
    """
    if recipe is None:
        return DEFAULT_RECIPE
    if isinstance(recipe, str) and recipe in RECIPES:
        return recipe
    if type(recipe).__name__ != "Float8LinearConfig":
        legal = ", ".join(repr(known) for known in RECIPES)
        legal += ", a `torchao.float8.Float8LinearConfig`, or `None`"
        raise ValueError(f"`fp8_recipe` must be one of {legal}; got {literal(recipe)}.")
    if getattr(recipe, "enable_fsdp_float8_all_gather", False):
        raise ValueError(
            "`fp8_recipe` has `enable_fsdp_float8_all_gather=True`, which replaces the parameters by tensors of another"
            " class: checkpoints would not load without torchao. Leave it out; weights are then gathered in their own"
            " dtype."
        )
    return recipe


def config_of(recipe: Any) -> Any:
    """Return the configuration of a checked recipe; raise an `ImportError` without a recent torchao.

    A name stands for torchao's own configuration, except that rows are padded where a product needs a multiple of 16.
    So the last batch of an epoch may have any size.
    """
    float8 = _torchao.torchao_float8()
    if not isinstance(recipe, str):
        return recipe
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return config if recipe == DEFAULT_RECIPE else replace(config, pad_inner_dim=True)


def emulates(recipe: Any) -> bool:
    """Return whether a recipe computes the results of fp8 hardware on other hardware."""
    return bool(getattr(recipe, "emulate", False))


def has_fp8(device: torch.device) -> bool:
    """Return whether the device has instructions for fp8 products."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip:  # MI300 and later
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


_FROZEN = "frozen; it runs in fp8 once it is unfrozen"
_PLAIN_FORWARDS = (nn.Linear.forward, calling(nn.Linear.forward))
"""The second is the `forward` of a copy that was made while the layer multiplied in fp8."""


def linear_layers(root: nn.Module) -> dict[str, nn.Linear]:
    """Return each `nn.Linear` of a module under its first name, in registration order."""
    return {_modules.plain_name(n): m for n, m in root.named_modules() if isinstance(m, nn.Linear)}


def choose_fp8_layers(
    root: nn.Module, in_fp32: Collection[nn.Module], recipe: Any, device: torch.device
) -> dict[str, str | None]:
    """Return for each `nn.Linear`, by its first name, `None` if it shall run in fp8, else the reason against it.

    Layers inside the modules `in_fp32` do not run in fp8. The recipe decides how large a layer must be before faster
    products outweigh its casts.
    """
    layers = linear_layers(root)
    inside_metrics = {m for metric in root.modules() if is_metric(metric) for m in metric.modules()}
    attention = {m.out_proj for m in root.modules() if isinstance(m, nn.MultiheadAttention)}
    ends = [layer for layer in layers.values() if layer not in inside_metrics]
    may_be_small = device.type == "cuda" and not emulates(recipe)

    def why_not(layer: nn.Linear) -> str | None:
        weight: Any = _modules.own_parameters(layer).get("weight")
        dtype, rows, columns = getattr(weight, "dtype", None), layer.out_features, layer.in_features
        size, in_tiles = f"{columns} x {rows}", columns % 16 == rows % 16 == 0 < columns * rows
        is_plain = getattr(layer.forward, "__func__", None) in _PLAIN_FORWARDS
        reasons = {
            "inside a metric": layer in inside_metrics,
            "in `fp32_modules`": layer in in_fp32,
            "converted to fp8 by you already": _is_converted(layer),
            "`nn.MultiheadAttention` uses its weight and never calls it": layer in attention,
            "its weight is computed from something else (a parametrization, pruning)": weight is None,
            "a subclass or the user has replaced its `forward`": not is_plain,
            "the first linear layer": layer in ends[:1],
            "the last linear layer": layer in ends[-1:],
            "lazy: its size is not known when the fit begins": is_lazy(weight),
            f"its weight is {str(dtype).removeprefix('torch.')}": dtype != torch.float32,
            f"{size}: not both are multiples of 16": not in_tiles,
            f"{size}: too small, casts would cost more than fp8 saves": may_be_small and _is_small(layer, recipe),
            _FROZEN: not getattr(weight, "requires_grad", False),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    return {name: why_not(layer) for name, layer in layers.items()}


def may_run_in_fp8(layers: Mapping[str, str | None]) -> set[str]:
    """Return the names of the layers that run in fp8, or would run in fp8 if they were not frozen."""
    return {name for name, why in layers.items() if why is None or why == _FROZEN}


def _is_converted(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Float8Linear" or type(layer).__module__.startswith("transformer_engine")


def _is_small(layer: nn.Linear, recipe: Any) -> bool:
    """Apply the rule of torchao's own filters, which were measured on an H100 (`_auto_filter_for_recipe`)."""
    granularity = recipe if isinstance(recipe, str) else recipe.cast_config_weight.scaling_granularity.value
    inputs, outputs = layer.in_features, layer.out_features
    if granularity == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


def fp8_summary(root: nn.Module, layers: Mapping[str, str | None], recipe: Any) -> str:
    """Say how many of the linear layers run in fp8, and their share of the FLOPs; nothing if there is none.

    The share assumes that each layer gets the same number of rows.
    """
    sizes = {name: layer.in_features * layer.out_features for name, layer in linear_layers(root).items()}
    chosen = [name for name, why in layers.items() if why is None]
    num_converted = sum(1 for m in root.modules() if _is_converted(m) and hasattr(m, "weight"))
    if not chosen and not num_converted:
        return ""
    share = sum(sizes[name] for name in chosen) / max(1, sum(sizes.values()))
    own = "own recipe, emulated" if emulates(recipe) else "own recipe"
    text = (
        f"fp8 products in {len(chosen)} of {counted(len(layers), 'linear layer')} (about {percent(share)} of their"
        f" FLOPs, {f'recipe {recipe!r}' if isinstance(recipe, str) else own})"
    )
    return f"{text} in addition to {num_converted} that you converted yourself" if num_converted else text


def nothing_qualifies(root: nn.Module, layers: Mapping[str, str | None]) -> str:
    """Explain why no layer runs in fp8, the most frequent reason first, and name other modules with linear maps."""
    reasons: dict[str, list[str]] = {}
    for name, why in layers.items():
        reasons.setdefault(str(why), []).append(f"`{name}`")
    found = sorted(reasons.items(), key=lambda item: -len(item[1]))[:8]
    others = Counter(type(module).__name__ for module in root.modules() if _computes_a_linear_map(module))
    if others:
        what = f"{counted(others.total(), 'layer')} with a weight matrix, but no `nn.Linear`"
        found.append((what, [f"`{name}` ({count})" for name, count in others.most_common()]))
    title = f"precision 'fp8' has nothing to do here: none of the {counted(len(layers), 'linear layer')} qualifies."
    return "\n".join([title, *(f"  - {reason}: {listed(names)}" for reason, names in found)])


def _computes_a_linear_map(module: nn.Module) -> bool:
    if isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return False
    own = module.named_parameters(recurse=False)
    return any("weight" in name and p.dim() == 2 and p.is_floating_point() and p.requires_grad for name, p in own)


@final
class _Float8Forward(MethodOverride):
    """The `forward` of a linear layer: in fp8 while the model trains under bf16 autocast, else as before.

    So evaluation, `fp32_modules`, regions without autocast and the fp32 shadows of callbacks never run in fp8. Grad
    mode does not show whether the model trains: activation checkpointing turns it off in the first forward. A copy of
    the layer (a teacher, an average) gets the plain method.
    """

    def __init__(self, owner: nn.Module, twin: Any, device_type: str, stage: Any) -> None:
        super().__init__(owner, "forward")
        self.twin, self.device_type, self.stage = twin, device_type, stage

    @override
    def __call__(self, input: Tensor) -> Tensor:  # `nn.Linear.forward` has this argument name
        if not self._in_fp8(input):
            return self.inner(input)
        # The input is flattened to rows here, because torchao cannot flatten a transposed tensor after its cast. The
        # cast is here because torchao's own cast checks CUDA's autocast only.
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        if torch.compiler.is_compiling():
            output = self.twin(rows)
            if self.twin.bias is None:
                output = output.clone()  # otherwise the output could not be edited in place; a compiler fuses this
        else:
            output = _torchao.float8_linear(self.twin, rows)
        return output.reshape(*input.shape[:-1], output.shape[-1])

    def _in_fp8(self, values: Tensor) -> bool:
        device_type, weight = self.device_type, _modules.own_parameters(self.twin).get("weight")
        return (
            self.stage.in_fp8
            and weight is not None  # pruning replaces it
            and torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == torch.bfloat16
            and weight.requires_grad  # otherwise an unneeded gradient would be computed
            and weight.dtype in (torch.float32, torch.bfloat16)  # FSDP2 may be told to gather it in bfloat16
            and values.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and values.device.type == device_type  # autocast is off elsewhere
            and values.layout == torch.strided
            and not values.is_nested
            and values.numel() > 0
            and (torch.compiler.is_compiling() or not _is_watched())
        )


def _is_watched() -> bool:
    """Return whether an active mode watches operations without support for fp8."""
    return _modules.is_transformed_or_traced() or _modules.in_forward_mode() or torch.is_inference_mode_enabled()


def linears_in_fp8(root: nn.Module, names: Collection[str], recipe: Any, device_type: str, stage: Any) -> Overrides:
    """Return a context in which the linear layers with these names multiply in fp8 while `stage.in_fp8` is true.

    Outside of it the module is plain. So copies, exports and evaluations in hooks and callbacks are plain as well.
    Without torchao, or with one that is too old, it raises an `ImportError`.

    Cost: a microsecond per layer and step to install the overrides and remove them.
    """
    config = config_of(recipe)
    chosen = [layer for name, layer in linear_layers(root).items() if name in names]
    twins = [_torchao.float8_twin(layer, config) for layer in chosen]
    return Overrides(_Float8Forward(*pair, device_type, stage) for pair in zip(chosen, twins, strict=True))
