"""Refuse modules, strategies and Fabric before the first batch, or warn of them. Each message contains the fix."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceXLAStrategy, XLAStrategy
from torch import nn

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._text import named
from lightning_amp.casting import Choice, has_bf16_units
from lightning_amp.numerics import nonfinite_gradients
from lightning_amp.precision import _upcast_parameters


def check(module: LightningModule, choice: Choice, device: torch.device, in_fp32: Collection[nn.Module] = ()) -> None:
    """Raise one `ValueError` if this module cannot be trained in this precision.

    Warn once of everything else that may be wrong. The submodules `in_fp32` compute in fp32 in any precision.
    """
    if not choice.mixed:
        return
    half = _upcast_parameters.trained_in_half(module)
    if half:
        finding = (
            f"trainable parameters are {' and '.join(sorted(set(half.values())))}: {_names([*half])}. Mixed precision"
            " keeps float32 parameters and casts them for each forward; in half precision most small updates are"
            f" rounded away. {_upcast_parameters.advice(module, [*half])}"
        )
        raise ValueError(_report(f"precision {choice.name!r} cannot train this module", [finding]))
    warnings = [
        *_own_scaling(module),
        *_unsafe_losses(module, device, in_fp32),
        *_slow(choice, device),
        *_compiled_backward(module),
    ]
    if warnings:
        _messages.warn(_report(f"possible problems with precision {choice.name!r}", warnings))


def _report(title: str, findings: list[str]) -> str:
    return "\n".join([f"lightning_amp: {title}:", *(f"  - {finding}" for finding in findings)])


def _names(names: Sequence[str]) -> str:
    return named([_modules.plain_name(name) for name in names])


def _own_scaling(module: LightningModule) -> list[str]:
    findings: list[str] = []
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            where = f"`{name}.{attribute}`" if name else f"`self.{attribute}`"
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                findings.append(
                    f"the module has its own `GradScaler` ({where}): this plugin scales, unscales and skips already,"
                    " and twice is wrong. Remove it, and call `self.manual_backward(loss)` and `optimizer.step()`"
                )
            elif isinstance(value, torch.autocast):
                findings.append(
                    f"the module has its own `torch.autocast` ({where}), which overrides the plugin's inside it. Remove"
                    " it, or use precision 'fp32'"
                )
    steps = [n for n in ("training_step", "forward") if "autocast(" in _source(getattr(module, n))]
    if steps:
        findings.append(
            f"{_names(steps)} uses `torch.autocast` itself, which overrides the plugin's inside it. If that is meant to"
            " choose the precision, remove it; to keep a region in fp32 it is fine"
        )
    return findings


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _unsafe_losses(module: LightningModule, device: torch.device, in_fp32: Collection[nn.Module]) -> list[str]:
    names = [n for n, m in module.named_modules() if isinstance(m, nn.BCELoss) and m not in in_fp32]
    if not names:
        return []
    raises = "raises under autocast on this device" if device.type == "cuda" else "raises under autocast on CUDA"
    return [
        f"`nn.BCELoss` ({_names(names)}) {raises}, since sigmoid outputs cannot be told apart in half precision. Use"
        " `nn.BCEWithLogitsLoss` on the logits"
    ]


def _slow(choice: Choice, device: torch.device) -> list[str]:
    """Describe a GPU without bfloat16 units. A CPU without them is found by the doctor, because it measures."""
    if choice.name != "bf16" or device.type != "cuda" or has_bf16_units(device):
        return []
    return ["this GPU emulates bfloat16: `doctor` measures what that costs, and precision 'auto' picks another format"]


def _compiled_backward(module: nn.Module) -> list[str]:
    compiled = (m for m in module.modules() if _modules.is_compiled(m) and not isinstance(m, torch.jit.ScriptModule))
    if _modules.CompiledBackwardWithoutAutocast.is_possible() or not any(compiled):
        return []
    return [
        f"the module is compiled, and torch {torch.__version__} runs a compiled backward under autocast. It rounds"
        " gradients of float32 regions (`fp32_modules`, losses) to half precision. Install torch 2.9 or later, which"
        " does not, or train without `torch.compile`"
    ]


def half_in_a_step(module: nn.Module) -> str:
    """Describe trainable parameters that a step has made half precision; empty if there are none."""
    names = [*_upcast_parameters.trained_in_half(module)]
    if not names:
        return ""
    owner = names[0].rpartition(".")[0] or "..."
    return (
        f"trainable parameters became half precision during the step: {_names(names)}. The code that uses them casts"
        " them to the dtype of its input (`weight.data = weight.data.to(x.dtype)`), and in half precision most small"
        f" updates are rounded away. Keep that module in float32, `fp32_modules=[{_modules.plain_name(owner)!r}]`, or"
        " cast its input: `x.float()`"
    )


def describe_nonfinite_gradients(*modules: nn.Module) -> str:
    """Name the first parameters whose gradients are not finite; empty if none are, or they are gone."""
    names = nonfinite_gradients(dict(pair for module in modules for pair in module.named_parameters()))
    return f"The first parameters with non-finite gradients are {_names(names)}" if names else ""


def as_text(representation: str) -> str:
    """Return a plugin as text, with a hint for `pytorch_lightning`, whose Trainer says it has an invalid type."""
    if "pytorch_lightning" not in sys.modules:
        return representation
    return (
        f"{representation} (a plugin for `lightning.pytorch`: use `import lightning as L; L.Trainer(...)`, not"
        " `pytorch_lightning.Trainer`, and derive the module from `L.LightningModule`)"
    )


# -- strategies --------------------------------------------------------------------------------------------------------

FP8_SHARDED = (
    "For fp8 with sharded parameters use FSDP2: `Trainer(strategy=ModelParallelStrategy(), plugins=[AmpPrecision("
    "'fp8')])`, with `fully_shard` in `configure_model` (`docs/guide/fsdp.md`)"
)
"""Advice for FSDP1, which cannot run fp8."""

_DEEPSPEED = (
    "DeepSpeed scales, casts and steps itself: leave the plugin out and write `Trainer(strategy=..., precision="
    "'bf16-mixed')` (or '16-mixed'), for which Lightning takes its own `DeepSpeedPrecision`"
)
_XLA = (
    "XLA casts the whole program itself: leave the plugin out and write `Trainer(precision='bf16-true')` (or"
    " '32-true'), for which Lightning takes its own `XLAPrecision`"
)


def require_strategy(plugin: Any, strategy: Any) -> None:
    """Raise a `TypeError` that names the right plugin, if the strategy takes another one."""
    sharded = isinstance(plugin, FSDPPrecision)
    if isinstance(strategy, DeepSpeedStrategy):
        fix = _DEEPSPEED
    elif isinstance(strategy, (XLAStrategy, SingleDeviceXLAStrategy)):
        fix = _XLA
    elif isinstance(strategy, FSDPStrategy) and not sharded:
        fix = FP8_SHARDED if plugin.fp8_recipe else f"use `lightning_amp.{as_written('FSDPAmpPrecision', plugin)}`"
    elif sharded and not isinstance(strategy, FSDPStrategy):
        fix = (
            f"use `lightning_amp.{as_written('AmpPrecision', plugin)}`, which takes the same arguments except"
            " `reduce_dtype` (it is for FSDP2, `ModelParallelStrategy`, too), or the strategy 'fsdp'"
        )
    else:
        return
    raise TypeError(f"`{plugin!r}` cannot be used with `{type(strategy).__name__}`: {fix}.")


def require_trainer(plugin: Any, module: Any) -> None:
    """Raise a `TypeError` in Fabric.

    Fabric accepts any precision plugin, but its loops do not let a plugin control the step.
    """
    if not isinstance(module, LightningModule) or module.fabric is not None or not _has_trainer(module):
        raise TypeError(
            f"`{plugin!r}` is a plugin for `L.Trainer`, which owns the optimizer step. In Fabric, where you write the"
            f" step, use `L.Fabric(plugins=[lightning_amp.{as_written('FabricAmpPrecision', plugin)}])`."
        )


def _has_trainer(module: LightningModule) -> bool:
    try:
        return isinstance(module.trainer, Trainer)
    except RuntimeError:  # Lightning's own error, if the module has no Trainer
        return False


def as_written(name: str, plugin: Any) -> str:
    """Return the code that makes this plugin, with another class name."""
    return f"{name}{repr(plugin).removeprefix(type(plugin).__name__)}"
