"""Facts about attributes and hooks of the user's objects: after a run with a plugin they must be as without one."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

Facts = dict[str, set[str]]


def structure(module: L.LightningModule, trainer: L.Trainer) -> Facts:
    """Return the class, the attributes and the number of hooks of each object."""
    found = {"torch": describe_globals()}
    for name, child in module.named_modules():
        found[f"module {name or type(child).__name__}"] = describe(child)
    for name, parameter in module.named_parameters():
        hooks = {n: getattr(parameter, n, None) or () for n in ("_backward_hooks", "_post_accumulate_grad_hooks")}
        kind = {str(parameter.dtype), f"requires_grad={parameter.requires_grad}"}
        found[f"parameter {name}"] = describe(parameter) | kind | {f"{len(h)} {n}" for n, h in hooks.items() if h}
    for i, optimizer in enumerate(trainer.optimizers):
        found[f"optimizer {i}"] = describe(optimizer)
    for i, config in enumerate(trainer.lr_scheduler_configs):
        found[f"schedule {i}"] = describe(config.scheduler)
    own = (c for c in trainer.callbacks if not type(c).__module__.startswith(("lightning_amp", "projects.arms")))
    for i, callback in enumerate(own):
        found[f"callback {i}"] = describe(callback)
    for i, logger in enumerate(trainer.loggers):
        found[f"logger {i}"] = describe(logger)
    return found


def describe(thing: Any) -> set[str]:
    facts = {"class " + " < ".join(c.__qualname__ for c in type(thing).__mro__)}
    for name, value in getattr(thing, "__dict__", {}).items():
        facts.add(f"attribute `{name}`")
        if name.endswith("hooks") and hasattr(value, "__len__") and len(value):
            facts.add(f"{len(value)} {name}")
    if isinstance(thing, nn.Module):
        facts |= {f"child `{name}`" for name in thing._modules}
    return facts


def describe_globals() -> set[str]:
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    state = {
        "autocast": torch.is_autocast_enabled(os.environ.get("LIGHTNING_AMP_TEST_DEVICE", "cpu")),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "global hooks": [len(getattr(global_hooks, name)) for name in hooks],
        "backward_pass_autocast": getattr(torch._functorch.config, "backward_pass_autocast", None),
    }
    return {f"{name}: {value}" for name, value in state.items()}


def differences(ours: Facts, plain: Facts) -> list[str]:
    """Return the facts that differ from a run without a plugin."""
    found: list[str] = []
    for name in sorted(ours.keys() | plain.keys()):
        a, b = ours.get(name, set()), plain.get(name, set())
        words = [f"has {fact}" for fact in sorted(a - b)] + [f"lacks {fact}" for fact in sorted(b - a)]
        if words:
            found.append(f"{name} {', '.join(words)}")
    return found
