"""What hangs on the user's objects, as text: the same after a run with a plugin as after one without."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.modules import module as global_hooks


def structure(module: L.LightningModule, trainer: L.Trainer) -> dict[str, str]:
    """One line per object: its class, its attributes and the number of its hooks."""
    found: dict[str, str] = {"torch": describe_globals()}
    for name, child in module.named_modules():
        found[f"module {name or type(child).__name__!r}"] = describe(child)
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        kind = f"{parameter.dtype} {parameter.requires_grad} {[len(h or ()) for h in hooks]}"
        found[f"parameter {name}"] = f"{describe(parameter)} {kind}"
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


def describe(thing: Any) -> str:
    bases = " < ".join(c.__qualname__ for c in type(thing).__mro__)
    attributes = vars(thing) if hasattr(thing, "__dict__") else {}
    hooks = {n: len(v) for n, v in attributes.items() if n.endswith("hooks") and hasattr(v, "__len__") and len(v)}
    # what a class that Lightning wrote keeps for itself may come and go with the loggers; methods may not
    names = sorted(attributes)
    children = sorted(thing._modules) if isinstance(thing, nn.Module) else []
    return f"{bases} {names} {children} {hooks}"


def describe_globals() -> str:
    return str(
        {
            "autocast": torch.is_autocast_enabled("cpu"),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "anomaly": torch.is_anomaly_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "function modes": torch._C._len_torch_function_stack(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "hooks": [
                len(getattr(global_hooks, name))
                for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
            ],
            "backward_pass_autocast": getattr(torch._functorch.config, "backward_pass_autocast", None),
        }
    )


def differences(ours: dict[str, str], plain: dict[str, str]) -> list[str]:
    """Lines that are not those of the run without a plugin."""
    found: list[str] = []
    for name in sorted(set(ours) | set(plain)):
        a, b = ours.get(name), plain.get(name)
        if a != b:
            found.append(f"{name}: {difference(a, b)}")
    return found


def difference(a: str | None, b: str | None) -> str:
    if a is None or b is None:
        return "is gone" if a is None else "is new"
    words = set(a.split()) ^ set(b.split())
    return ", ".join(sorted(words)[:8]) or "is in another order"
