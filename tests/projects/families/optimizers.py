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

# name: (where it is, its arguments, the project's settings)
TORCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd_momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "sgd_fused": ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam_amsgrad": ("Adam", {"lr": 1e-3, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 1e-3, "foreach": False}),
    "adamw_foreach": ("AdamW", {"lr": 1e-3, "foreach": True}),
    "adamw_fused": ("AdamW", {"lr": 1e-3, "fused": True}),
    "adagrad": ("Adagrad", {"lr": 1e-2}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "nadam": ("NAdam", {"lr": 1e-3}),
    "radam": ("RAdam", {"lr": 1e-3}),
    "adamax": ("Adamax", {"lr": 1e-3}),
    "asgd": ("ASGD", {"lr": 1e-2}),
    "rprop": ("Rprop", {"lr": 1e-3}),
    "adafactor": ("Adafactor", {"lr": 1e-2}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lion": ("lion_pytorch.Lion", {"lr": 1e-4, "weight_decay": 1e-2}),
    "prodigy": ("prodigyopt.Prodigy", {"lr": 1.0}),
    "adabelief": ("pytorch_optimizer.AdaBelief", {"lr": 1e-3}),
    "adan": ("pytorch_optimizer.Adan", {"lr": 1e-3}),
    "adopt": ("pytorch_optimizer.ADOPT", {"lr": 1e-3}),
    "came": ("pytorch_optimizer.CAME", {"lr": 1e-3}),
    "lamb": ("pytorch_optimizer.Lamb", {"lr": 1e-3}),
    "lars": ("pytorch_optimizer.LARS", {"lr": 1e-2}),
    "madgrad": ("pytorch_optimizer.MADGRAD", {"lr": 1e-3}),
    "ranger21": ("pytorch_optimizer.Ranger21", {"lr": 1e-3, "num_iterations": 6}),
    "shampoo": ("pytorch_optimizer.Shampoo", {"lr": 1e-3}),
    "soap": ("pytorch_optimizer.SOAP", {"lr": 1e-3}),
    "sophia": ("pytorch_optimizer.SophiaH", {"lr": 1e-3}),
    "tiger": ("pytorch_optimizer.Tiger", {"lr": 1e-4}),
    "dadapt_adam": ("pytorch_optimizer.DAdaptAdam", {"lr": 1.0}),
}
CREATE_GRAPH = {"sophia"}  # second derivatives: a backward of its own


def optimizers(**settings: Any) -> Any:
    return project("optimizers", **settings)


def with_optimizer(make: Callable[[Any], Any], module: type[Classifier] = Classifier, **trainer: Any) -> Setup:
    return Setup(module(make), vectors(), vectors(16), trainer=trainer)


def add(name: str, path: str, arguments: dict[str, Any]) -> None:
    library, _, cls = path.rpartition(".")
    what = f"`{cls}({', '.join(f'{k}={v}' for k, v in arguments.items())})` of {library}."

    @optimizers(name=f"optimizer_{name}", needs=(path,), what=what, quick=name in ("sgd_momentum", "adamw_fused"))
    def with_it() -> Setup:
        return with_optimizer(lambda p: find(path)(p, **arguments), gradient_clip_val=None if "fused" in name else 1.0)


for _name, (_class, _arguments) in TORCHS.items():
    add(_name, f"torch.optim.{_class}", _arguments)
for _name, (_path, _arguments) in OTHERS.items():
    if _name not in CREATE_GRAPH:
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


@optimizers(needs=("pytorch_optimizer.SAM",))
def optimizer_sam_manual() -> Setup:
    """SAM of pytorch_optimizer by hand: two backwards per batch, `first_step` and `second_step`."""
    from pytorch_optimizer import SAM

    class Manual(NoDropout):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Any:
                loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.log("train_loss", loss)
                return loss

            closure()
            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return SAM(self.parameters(), base_optimizer=torch.optim.SGD, lr=0.05)

    return Setup(Manual(), vectors(), vectors(16))


@optimizers(needs=("pytorch_optimizer.Lookahead",))
def optimizer_lookahead() -> Setup:
    """Lookahead of pytorch_optimizer around AdamW."""
    from pytorch_optimizer import Lookahead

    return with_optimizer(lambda p: Lookahead(torch.optim.AdamW(p, lr=1e-3), k=2))


@optimizers(needs=("schedulefree",))
def optimizer_schedule_free() -> Setup:
    """Schedule-free AdamW: the module calls `train()` and `eval()` of the optimizer around validation."""
    import schedulefree

    class ScheduleFree(Classifier):
        def on_train_epoch_start(self) -> None:
            self.optimizers().optimizer.train()

        def on_validation_epoch_start(self) -> None:
            self.optimizers().optimizer.eval()

        def on_validation_epoch_end(self) -> None:
            self.optimizers().optimizer.train()

    make = ScheduleFree(lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-3, warmup_steps=2))
    return Setup(make, vectors(), vectors(16))


@optimizers(needs=("schedulefree",))
def optimizer_schedule_free_closure() -> Setup:
    """Schedule-free SGD with closure: it moves the weights, calls the closure, and steps."""
    import schedulefree

    return with_optimizer(lambda p: schedulefree.SGDScheduleFreeClosure(p, lr=0.05), NoDropout)


@optimizers()
def optimizer_groups_frozen_and_empty() -> Setup:
    """Three parameter groups with different learning rates; one is frozen, and one gets no gradient."""

    class Groups(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.net[0].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters(), "lr": 1e-4}, {"params": self.unused.parameters(), "lr": 1.0}]
            return torch.optim.AdamW([*groups, {"params": self.net[4].parameters()}], lr=1e-3)

    return Setup(Groups(), vectors(), vectors(16), trainer={"gradient_clip_val": 0.5})


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


@optimizers(quick=True)
def optimizer_in_two_frequencies() -> Setup:
    """Two optimizers in manual optimization; the second steps in every other batch, with clipping by hand."""

    class Pair(NoDropout):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            if batch_idx % 2:
                second.step()
                second.zero_grad()
            self.log("train_loss", loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[0].parameters(), 0.05), torch.optim.Adam(self.net[2].parameters(), 1e-3)

    return Setup(Pair(), vectors(), vectors(16))
