"""A small model, its data, and helpers to inspect it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

FEATURES = 8


class Toy(L.LightningModule):
    """A regression that every precision can learn; tests replace its parts."""

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        net: nn.Module | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
        self.make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.05))
        self.make_schedule = schedule

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(batch).float(), batch.sum(1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_schedule(optimizer), "interval": "step"},
        }


class Manual(Toy):
    """The same in manual optimization: `edit` is what a test does with the gradients."""

    automatic_optimization = property(lambda self: False)

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        """Is called between the backward and the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.edit(optimizer, batch_idx)
        optimizer.step()


class Island(nn.Module):
    """A region that its author keeps in fp32; its backward runs where the caller calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(x.float() @ self.weight)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as published: it climbs, asks for gradients again, comes back, and steps."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["climb"] = p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            p.add_(self.state[p]["climb"])
        closure()
        for p in params:
            p.sub_(self.state[p]["climb"])
        self.base.step()
        return loss


class TakesNoClosure(torch.optim.Optimizer):
    """SGD whose `step` takes no closure, but a keyword of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.got: list[Any] = []

    @torch.no_grad()
    def step(self, *, something: Any = None) -> Any:  # type: ignore[override]
        self.got.append(something)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(p.grad, alpha=-0.05)
        return "stepped"


def with_batch_norm(**first: Any) -> nn.Sequential:
    """Return another net for `Toy`."""
    return nn.Sequential(nn.Linear(FEATURES, 16, **first), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def batches(count: int = 8, size: int = 4, seed: int = 0) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.randn(count * size, FEATURES, generator=generator), batch_size=size)


def weights(module: nn.Module | L.Trainer) -> dict[str, Tensor]:
    module = module.lightning_module if isinstance(module, L.Trainer) else module
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(a: Any, b: Any, **tolerance: float) -> None:
    """Compare bit for bit, unless a tolerance is given."""
    a, b = (weights(x) if isinstance(x, (nn.Module, L.Trainer)) else x for x in (a, b))
    torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0.0, "atol": 0.0}), equal_nan=True)


def assert_finite(trained: nn.Module | L.Trainer) -> None:
    assert all(bool(value.isfinite().all()) for value in weights(trained).values()), "not finite"


def attributes(module: nn.Module) -> dict[str, set[str]]:
    """Return all attributes of a module, without the ones that Lightning adds to the root while it trains."""
    own = {name: set(vars(m)) for name, m in module.named_modules()}
    own[""] = {n for n in own[""] if n == "forward" or n.startswith("on_") or n.endswith("_step")}
    return own


class Quantized(Tensor):
    """Cannot be asked for its values, as torchao's quantized tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.aminmax, torch.isfinite, torch.isnan, Tensor.abs):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs)
