"""Protect from optimizers that move parameters before their last closure call, such as LBFGS and SAM."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lightning_amp.scaling._gradients import parameters


def calls_closure_late(optimizer: Optimizer) -> bool:
    """Return whether `step` may move parameters before its last closure call, by its source.

    It may if it uses the closure twice, or if loops, edits in place or calls of other methods come before. Torch's own
    optimizers do not, except LBFGS. A class whose source is not there is known after its first step.
    """
    steps = {inspect.unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind)}
    for step in steps:
        if step.__module__.startswith("torch.optim"):
            continue
        try:
            nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(step))))]
        except (OSError, TypeError, SyntaxError):
            continue
        checks = {id(n) for each in nodes if isinstance(each, (ast.If, ast.IfExp)) for n in ast.walk(each.test)}
        calls = [node for node in nodes if isinstance(node, ast.Call) and id(node) not in checks]
        uses = [c for c in calls if any(getattr(arg, "id", "") == "closure" for arg in (c.func, *c.args))]
        uses += [c for c in calls if any(getattr(keyword.value, "id", "") == "closure" for keyword in c.keywords)]
        first = min((use.lineno for use in uses), default=0)
        loops = [node for node in nodes if isinstance(node, (ast.For, ast.While))]
        methods = [c for c in calls if isinstance(c.func, ast.Attribute) and not c.func.attr.endswith("health_check")]
        edits = [c for c in methods if getattr(c.func.value, "id", "") == "self" or c.func.attr.endswith("_")]  # type: ignore
        if len(uses) > 1 or any(node.lineno < first for node in (*loops, *edits)):
            return True
    return isinstance(optimizer, torch.optim.LBFGS)


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Copy parameters and optimizer state, and return a function that restores them.

    An optimizer inside the optimizer is copied too.
    """
    optimizers = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, Optimizer))]
    params = list({id(p): p for o in optimizers for p in parameters(o)}.values())
    values = [p.detach().clone() for p in params]
    memo = {id(p): p for p in params}
    states = [copy.deepcopy(o.state, memo) for o in optimizers]

    def restore() -> None:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        for o, state in zip(optimizers, states, strict=True):
            o.state = state

    return restore
