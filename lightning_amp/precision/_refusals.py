"""Refuse modules, strategies and Fabric before the first batch, or warn of them. Each message contains the fix."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._compat._names import (
    DeepSpeedStrategy,
    FSDPPrecision,
    FSDPStrategy,
    LightningModule,
    SingleDeviceXLAStrategy,
    Trainer,
    XLAStrategy,
    require_kind,
)
from lightning_amp._text import named
from lightning_amp.casting import Choice, has_bf16_units
from lightning_amp.numerics import nonfinite_gradients
from lightning_amp.precision import _upcast_parameters


def check(module: LightningModule, choice: Choice, device: torch.device, in_fp32: Collection[nn.Module] = ()) -> None:
    """Refuse a module that cannot be trained in this precision, and warn once of all that may be wrong with it.

    The submodules `in_fp32` compute in fp32 in any precision.
    """
    if not choice.mixed:
        return
    refuse_half_parameters(module, choice, lambda names: _upcast_parameters.advice(module, names))
    findings = [*_own_scaling(module), *_unsafe_losses(module, in_fp32)]
    if choice.name == "bf16" and device.type == "cuda" and not has_bf16_units(device):
        findings.append("this GPU emulates bfloat16: `doctor` measures what that costs, 'auto' picks another precision")
    if findings:
        title = f"lightning_amp: possible problems with precision {choice.name!r}:"
        _messages.warn("\n  - ".join([title, *findings]))


def refuse_half_parameters(module: nn.Module, choice: Choice, advice: Callable[[list[str]], str]) -> None:
    """Raise a `ValueError` if trainable parameters are in half precision; `advice(names)` is the fix."""
    if half := _upcast_parameters.trained_in_half(module):
        raise ValueError(
            f"lightning_amp: precision {choice.name!r} cannot train this module: trainable parameters are"
            f" {_upcast_parameters.dtypes(half)}: {_names([*half])}. Mixed precision keeps float32 parameters,"
            f" because in half precision most small updates are rounded away. {advice([*half])}."
        )


def _names(names: Sequence[str]) -> str:
    return named([_modules.plain_name(name) for name in names])


def _own_scaling(module: LightningModule) -> Iterator[str]:
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                yield (
                    f"the module has its own `GradScaler` (`{name or 'self'}.{attribute}`): the plugin scales, unscales"
                    " and skips already. Remove it, and call `self.manual_backward(loss)` and `optimizer.step()`"
                )
    for step in ("training_step", "forward"):
        if re.search(r"autocast\((?!.*enabled=False|[^)]*enabled=False)", _source(getattr(module, step))):
            yield (
                f"`{step}` uses `torch.autocast` itself, which overrides the plugin's inside it. If that is meant to"
                " choose the precision, remove it"
            )


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _unsafe_losses(module: LightningModule, in_fp32: Collection[nn.Module]) -> Iterator[str]:
    names = [name for name, loss in module.named_modules() if isinstance(loss, nn.BCELoss) and loss not in in_fp32]
    if names:
        yield (
            f"`nn.BCELoss` ({_names(names)}) raises under autocast on CUDA, since sigmoid outputs cannot be told apart"
            " in half precision. Use `nn.BCEWithLogitsLoss` on the logits"
        )


def half_in_a_step(module: nn.Module) -> str:
    """Describe trainable parameters that a step has made half precision; empty if there are none."""
    if not (names := [*_upcast_parameters.trained_in_half(module)]):
        return ""
    owner = _modules.plain_name(names[0]).rpartition(".")[0]
    return (
        f"trainable parameters became half precision during the step: {_names(names)}. In half precision most small"
        f" updates are rounded away. Keep their module in float32: `fp32_modules=[{owner!r}]`"
    )


def describe_nonfinite_gradients(*modules: nn.Module) -> str:
    """Name the first parameters whose gradients are not finite; empty if none are, or they are gone."""
    names = nonfinite_gradients(dict(pair for module in modules for pair in module.named_parameters()))
    return f"The first parameters with non-finite gradients are {_names(names)}" if names else ""


# -- strategies --------------------------------------------------------------------------------------------------------

FP8_SHARDED = (
    "For fp8 with sharded parameters use FSDP2: `Trainer(strategy=ModelParallelStrategy(), plugins=[AmpPrecision("
    "'fp8')])`, with `fully_shard` in `configure_model` (`docs/guide/many_devices.md`)"
)
"""Advice for FSDP1, which cannot run fp8."""


def require_strategy(plugin: Any, strategy: Any) -> None:
    """Raise a `TypeError` that names the right plugin, if the strategy takes another one."""
    sharded = isinstance(plugin, FSDPPrecision)
    if isinstance(strategy, DeepSpeedStrategy):
        fix = _own_plugin("DeepSpeed", "strategy=..., precision='bf16-mixed'")
    elif isinstance(strategy, (XLAStrategy, SingleDeviceXLAStrategy)):
        fix = _own_plugin("XLA", "precision='bf16-true'")
    elif isinstance(strategy, FSDPStrategy) and not sharded:
        fix = FP8_SHARDED if plugin.fp8_recipe else f"use `lightning_amp.{as_written('FSDPAmpPrecision', plugin)}`"
    elif sharded and not isinstance(strategy, FSDPStrategy):
        fix = f"use `lightning_amp.{as_written('AmpPrecision', plugin)}`, also for FSDP2 (`ModelParallelStrategy`)"
    else:
        return
    raise TypeError(f"`{plugin!r}` cannot be used with `{type(strategy).__name__}`: {fix}.")


def _own_plugin(name: str, arguments: str) -> str:
    return (
        f"{name} casts and steps itself: leave the plugin out and write `Trainer({arguments})`, for which Lightning"
        f" takes its own `{name}Precision`"
    )


def require_trainer(plugin: Any, module: Any) -> None:
    """Raise a `TypeError` in Fabric.

    Fabric accepts any precision plugin, but its loops do not let a plugin control the step.
    """
    require_kind(module, type(plugin).__name__)
    try:
        fine = isinstance(module, LightningModule) and module.fabric is None and isinstance(module.trainer, Trainer)
    except RuntimeError:  # Lightning's own error, if the module has no Trainer
        fine = False
    if not fine:
        raise TypeError(
            f"`{plugin!r}` is a plugin for `L.Trainer`, which owns the optimizer step. In Fabric, where you write the"
            f" step, use `L.Fabric(plugins=[lightning_amp.{as_written('FabricAmpPrecision', plugin)}])`."
        )


def as_written(name: str, plugin: Any) -> str:
    """Return the code that makes a plugin of another class with the precision of this one."""
    return f"{name}({plugin._requested!r})"
