# pyright: reportMissingImports=false
"""Optimizers, torch's own and other people's, on the classifier of `tutorials.py`; with clipping unless fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors
from projects.registry import find

# name: (where it is, its arguments)
BY_NAME: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd_momentum": ("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "adamw_fused": ("torch.optim.AdamW", {"lr": 1e-3, "fused": True}),
    "lion": ("lion_pytorch.Lion", {"lr": 1e-4, "weight_decay": 1e-2}),
}


def optimizers(**settings: Any) -> Any:
    return project("optimizers", **settings)


def with_optimizer(make: Callable[[Any], Any], module: type[Classifier] = Classifier, **trainer: Any) -> Setup:
    return Setup(module(make), vectors(), vectors(16), trainer=trainer)


def add(name: str, path: str, arguments: dict[str, Any]) -> None:
    library, _, cls = path.rpartition(".")
    what = f"`{cls}({', '.join(f'{k}={v}' for k, v in arguments.items())})` of {library}."

    @optimizers(name=f"optimizer_{name}", needs=(path,), what=what, quick=name != "lion")
    def with_it() -> Setup:
        return with_optimizer(lambda p: find(path)(p, **arguments), gradient_clip_val=None if "fused" in name else 1.0)


for _name, (_path, _arguments) in BY_NAME.items():
    add(_name, _path, _arguments)


@optimizers(needs=("torch.optim.Muon",), quick=True)
def optimizer_muon() -> Setup:
    """Muon for the matrices and AdamW for the rest: two optimizers, manual optimization."""

    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            self.log("train_loss", loss)

        def configure_optimizers(self) -> Any:
            matrices = [p for p in self.parameters() if p.ndim == 2]
            rest = [p for p in self.parameters() if p.ndim != 2]
            return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)

    return Setup(Two(), vectors(), vectors(16))


@optimizers(look="before", quick=True)
def optimizer_lbfgs() -> Setup:
    """LBFGS, which calls the closure several times per step."""
    return with_optimizer(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"), NoDropout)


class NoDropout(Classifier):
    """For optimizers that expect the same loss twice."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


@optimizers(needs=("pytorch_optimizer.SAM",), look="before")
def optimizer_sam_closure() -> Setup:
    """SAM of pytorch_optimizer in automatic optimization: the step of SAM calls the closure."""
    from pytorch_optimizer import SAM

    return with_optimizer(lambda p: SAM(p, base_optimizer=torch.optim.SGD, lr=0.05), NoDropout)


@optimizers(needs=("schedulefree",))
def optimizer_schedule_free_closure() -> Setup:
    """Schedule-free SGD with closure: it moves the weights, calls the closure, and steps."""
    import schedulefree

    return with_optimizer(lambda p: schedulefree.SGDScheduleFreeClosure(p, lr=0.05), NoDropout)


@optimizers()
def optimizer_own() -> Setup:
    """A custom optimizer (sign of the momentum) that does not return the closure's value."""

    class SignMomentum(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        momentum.lerp_(p.grad, 0.1)
                        p.add_(momentum.sign(), alpha=-group["lr"])

    return with_optimizer(SignMomentum)
