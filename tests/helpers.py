"""What the tests share: a quiet Trainer, small models, injected overflow, and comparisons with fp32."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision, DynamicLossScaler

FEATURES = 8
DEVICE = os.environ.get("LIGHTNING_AMP_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def flags_on_a_device() -> Generator[None, None, None]:
    """The CPU takes a GPU's path: without this the host reads each flag, since on the CPU that costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("_steps", "_gradients", "_windows", "_moves"):
            patch.setattr(f"lightning_amp.scaling.{module}.in_host_memory", lambda scalar: False)
        yield


def run_scenarios(scenarios: dict[str, Callable[[], Any]], wanted: Sequence[str]) -> dict[str, Any]:
    """For scripts with many of them: the results by name; none wanted means all. Fused ones take a GPU's path."""
    results: dict[str, Any] = {}
    for name, run in scenarios.items():
        if not wanted or name in wanted:
            on_a_device = "fused" in name and "unfused" not in name
            with flags_on_a_device() if on_a_device else contextlib.nullcontext():
                results[name] = run()
    return results


class Toy(L.LightningModule):
    """A regression that any precision learns. Everything about it can be changed from outside."""

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


def batches(count: int = 8, size: int = 4, seed: int = 0) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.randn(count * size, FEATURES, generator=generator), batch_size=size)


def quiet_trainer(**kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": DEVICE,
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(defaults | kwargs))


def fit(
    module: L.LightningModule | Callable[[], L.LightningModule],
    plugin: Any = None,
    data: Any = None,
    seed: int = 0,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.Trainer:
    """Train from a seed; the module is `trainer.lightning_module`."""
    torch.manual_seed(seed)
    if not isinstance(module, L.LightningModule):
        module = module()
    trainer = quiet_trainer(plugins=None if plugin is None else [plugin], **kwargs)
    trainer.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module | L.Trainer) -> dict[str, Tensor]:
    module = module.lightning_module if isinstance(module, L.Trainer) else module
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(a: Any, b: Any, **tolerance: float) -> None:
    """Bit for bit, unless a tolerance is given."""
    a, b = (weights(x) if isinstance(x, (nn.Module, L.Trainer)) else x for x in (a, b))
    torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0.0, "atol": 0.0}), equal_nan=True)


def attributes(module: nn.Module) -> dict[str, set[str]]:
    """All there is on a module, except what Lightning itself adds to the root while it trains."""
    own = {name: set(vars(m)) for name, m in module.named_modules()}
    own[""] = {n for n in own[""] if n == "forward" or n.startswith("on_") or n.endswith("_step")}
    return own


class WithoutAutocast(AmpPrecision):
    """The whole fp16 machinery, scaling included, in full precision: with powers of two it must equal fp32 exactly."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


class StockWithoutAutocast(MixedPrecision):
    """Lightning's own fp16 plugin, likewise; to show that a test can fail."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


def scaled_fp32(**scaler: Any) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=DynamicLossScaler(**scaler))


def stock_fp32(**scaler: Any) -> MixedPrecision:
    return StockWithoutAutocast("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))


def stock(precision: str, **scaler: Any) -> MixedPrecision:
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", DEVICE)
    return MixedPrecision("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, **scaler))


class Recorder(L.pytorch.loggers.Logger):
    """A logger that keeps what it is given."""

    name = version = "recorder"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Poison(L.Callback):
    """Makes the gradients of chosen batches overflow (after the backward, still scaled), or their loss NaN."""

    def __init__(self, gradient: Iterable[int] = (), loss: Iterable[int] = (), value: float = float("inf")) -> None:
        self.gradient, self.loss, self.value = set(gradient), set(loss), value
        self.batch = -1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch += 1
        if self.batch in self.loss:
            batch.fill_(float("nan"))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.batch in self.gradient:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.flatten()[0] = self.value
