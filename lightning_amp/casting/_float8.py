"""fp8: choose the linear layers that gain from it, and multiply in 8 bits there while a model trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torchao
from lightning_amp._text import counted, listed
from lightning_amp.casting._float8_recipes import config_of, emulates
from lightning_amp.casting._fp32_metrics import is_metric
from lightning_amp.casting._method_override import MethodOverride, Overrides, calling, not_run

_FROZEN = "frozen; it runs in fp8 once it is unfrozen"


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
    small = _too_small(recipe) if device.type == "cuda" and not emulates(recipe) else None

    def why_not(layer: nn.Linear) -> str | None:
        weight = vars(layer)["_parameters"].get("weight")
        if layer in inside_metrics:
            return "inside a metric"
        if layer in in_fp32:
            return "in `fp32_modules`"
        if _is_converted(layer):
            return "converted to fp8 by you already"
        if layer in attention:
            return "`nn.MultiheadAttention` uses its weight and never calls it"
        if weight is None:
            return "its weight is computed from something else (a parametrization, pruning)"
        # a copy made while the layer multiplied in fp8 has the second class
        if getattr(layer.forward, "__func__", None) not in (nn.Linear.forward, calling(nn.Linear.forward)):
            return "a subclass or the user has replaced its `forward`"
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
    """Return the names of the layers that run in fp8, or would run in fp8 if they were not frozen."""
    return {name for name, why in layers.items() if why is None or why == _FROZEN}


def _is_converted(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Float8Linear" or type(layer).__module__.startswith("transformer_engine")


def _too_small(recipe: Any) -> Callable[[int, int], bool]:
    """Return the rule of torchao's own filters, which were measured on an H100 (`_auto_filter_for_recipe`)."""
    granularity = recipe if isinstance(recipe, str) else recipe.cast_config_weight.scaling_granularity.value
    if granularity == "tensorwise":
        return lambda inputs, outputs: inputs <= 4096 and outputs <= 1024
    return lambda inputs, outputs: outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


def share_of_flops(root: nn.Module, layers: Mapping[str, str | None]) -> float:
    """Return the share of all linear layers' FLOPs that runs in fp8, if every layer gets the same number of rows."""
    sizes = {name: layer.in_features * layer.out_features for name, layer in linear_layers(root).items()}
    return sum(sizes[n] for n, why in layers.items() if why is None) / max(1, sum(sizes[n] for n in layers))


def num_converted(root: nn.Module) -> int:
    """Count the layers that the user has converted to fp8."""
    return sum(1 for m in root.modules() if _is_converted(m) and hasattr(m, "weight"))


def nothing_qualifies(root: nn.Module, layers: Mapping[str, str | None]) -> str:
    """Explain why no layer runs in fp8, the most frequent reason first, and name other modules with linear maps."""
    reasons: dict[str, list[str]] = {}
    for name, why in layers.items():
        reasons.setdefault(str(why), []).append(f"`{name}`")
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = [f"  - {reason}: {listed(names)}" for reason, names in ordered[:8]]
    others = Counter(type(module).__name__ for module in root.modules() if _computes_a_linear_map(module))
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
        self.note_call()
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
            and (
                torch.compiler.is_compiling()
                # no active mode watches operations without support for fp8
                or not (
                    _modules.is_transformed_or_traced()
                    or _modules.in_forward_mode()
                    or torch.is_inference_mode_enabled()
                )
            )
        )


@final
class Float8Linears:
    """Context in which the linear layers of `root` with these names multiply in fp8 while `stage.in_fp8` is true.

    Outside of it the module is plain. So copies, exports and evaluations in hooks and callbacks are plain as well.
    Without torchao, or with one that is too old, the constructor raises an `ImportError`.

    Cost: a microsecond per layer and step to install the overrides and remove them.
    """

    def __init__(self, root: nn.Module, names: Collection[str], recipe: Any, device_type: str, stage: Any) -> None:
        config = config_of(recipe)
        self._forwards = {
            name: _Float8Forward(layer, _torchao.float8_twin(layer, config), device_type, stage)
            for name, layer in linear_layers(root).items()
            if name in names
        }
        self._overrides = Overrides(self._forwards.values())

    def __enter__(self) -> None:
        self._overrides.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._overrides.__exit__(*exc)

    def idle(self) -> list[str]:
        """Name the layers that have not multiplied in fp8, if that is known."""
        return not_run(self._forwards)
