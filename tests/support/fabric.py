"""Run small Fabric loops in fp32, with our plugin, and with Fabric's own, which must fail where a promise says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from multi_rank.ranks import Infinite
from torch import Tensor, nn
from zoo.toy import FEATURES

from lightning_amp import DynamicLossScaler, FabricAmpPrecision
from support.devices import DEVICE
from support.promises import DECIDED_BY_A_FLAG, each_of, plain_adamw

slow = pytest.mark.slow
CASES = ["adamw", "fused adamw"]
Trouble = Mapping[int, Literal["gradient", "loss", "input"]]
"""Maps a batch to its trouble: infinite gradients, a NaN loss, or an infinite input."""


@dataclass(frozen=True)
class FabricPlugins:
    """Make the plugin for a promise: ours, or Fabric's own with torch's scaler or with ours."""

    kind: Literal["ours", "torch's scaler", "our scaler"] = "ours"
    flags_on_a_device: bool = False

    @property
    def ours(self) -> bool:
        return self.kind == "ours"

    def fp16(self, init_scale: float = 2.0**10, settings: Any = None, **scaler: Any) -> Any:
        """Return a plugin with loss scaling. `settings` go to our plugin alone."""
        if self.ours:
            return FabricAmpPrecision("fp16", scaler=DynamicLossScaler(init_scale, **scaler), **(settings or {}))
        if self.kind == "our scaler":
            return MixedPrecision("16-mixed", DEVICE, DynamicLossScaler(init_scale, **scaler))
        return MixedPrecision("16-mixed", DEVICE, torch.amp.GradScaler(DEVICE, init_scale=init_scale, **scaler))

    def bf16(self, **settings: Any) -> Any:
        return FabricAmpPrecision("bf16", **settings) if self.ours else MixedPrecision("bf16-mixed", DEVICE)


SAME = "the same as with torch's scaler"


def promise(
    row: int | str,
    stock: str | None,
    raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
    our_scaler: str | None = SAME,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the test of a row of the promises, as `support.promises.promise` does for the Trainer.

    Args:
        row: The number of the row, for the test id.
        stock: Pattern of the error with which the same test fails under Fabric's own plugin with torch's scaler.
        raises: The type of the error.
        our_scaler: The same with our scaler in Fabric's plugin; `None` if that keeps the promise.

    """

    where = [False, True] if row in DECIDED_BY_A_FLAG else [False]
    cases = [
        *((FabricPlugins("ours", on), f"ours{', flags on a device' * on}", None) for on in where),
        (FabricPlugins("torch's scaler"), "stock", stock),
        (FabricPlugins("our scaler"), "stock with our scaler", stock if our_scaler == SAME else our_scaler),
    ]
    return each_of(row, cases, raises)


# -- a small model and its data ----------------------------------------------------------------------------------------


class Exact(nn.Module):
    """Compute in fp32 under any autocast. With scales that are powers of two, a loop must equal fp32 bit for bit."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return self.net(x.float())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def exact() -> nn.Module:
    return Exact(net())


def batches(count: int = 8, size: int = 4, seed: int = 0) -> list[Tensor]:
    """Return batches that both half-precision formats hold exactly, since Fabric's own plugin rounds all inputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, FEATURES, generator=generator).bfloat16().float() for _ in range(count)]


def without(bad: Iterable[int], data: Sequence[Tensor] | None = None) -> list[Tensor]:
    return [batch for index, batch in enumerate(batches() if data is None else data) if index not in set(bad)]


def spoilt(loss: Tensor, trouble: str | None) -> Tensor:
    if trouble == "gradient":
        return Infinite.apply(loss)
    return loss * torch.nan if trouble == "loss" else loss


# -- loops -------------------------------------------------------------------------------------------------------------


def make_fabric(plugin: Any = None, **kwargs: Any) -> L.Fabric:
    plugins = None if plugin is None else [plugin]
    return L.Fabric(**{"accelerator": DEVICE, "devices": 1, "plugins": plugins, **kwargs})


class Loop:
    """A regression in Fabric; `plugin=None` is fp32.

    Args:
        plugin: The precision plugin.
        make: Makes the model.
        optimizer: Makes the optimizer.
        trouble: The bad batches.

    """

    def __init__(
        self,
        plugin: Any = None,
        make: Callable[[], nn.Module] = exact,
        optimizer: Callable[[Any], torch.optim.Optimizer] = plain_adamw,
        trouble: Trouble | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.plugin, self.trouble = plugin, trouble or {}
        self.fabric = make_fabric(plugin)
        module = make()
        self.raw = optimizer(module.parameters())
        self.model, self.optimizer = self.fabric.setup(module, self.raw)
        self.index = 0

    def loss(self, batch: Tensor) -> Tensor:
        batch = self.fabric.to_device(batch)
        trouble = self.trouble.get(self.index)
        outputs = self.model(batch * torch.inf if trouble == "input" else batch)
        loss = nn.functional.mse_loss(outputs.float(), batch.sum(1, keepdim=True))
        return spoilt(loss, trouble)

    def backward(self, batch: Tensor, divisor: int = 1) -> None:
        self.fabric.backward(self.loss(batch) / divisor)

    def clip(self, max_norm: float | None = None, clip_val: float | None = None) -> Any:
        return self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm, clip_val=clip_val)

    def unscale(self) -> None:
        """Ask any plugin for the true gradients."""
        if isinstance(self.plugin, FabricAmpPrecision):
            self.plugin.unscale_(self.optimizer)
        elif self.plugin is not None:
            self.plugin.unscale_gradients(self.raw)

    def run(
        self,
        data: Iterable[Tensor] | None = None,
        edit: Callable[[Loop], Any] | None = None,
        after: Callable[[Loop], Any] | None = None,
        accumulate: int = 1,
    ) -> Loop:
        """Train; `edit` runs before each optimizer step, and `after` after it."""
        for batch in batches() if data is None else data:
            window_ends = (self.index + 1) % accumulate == 0
            if self.index % accumulate == 0:
                self.optimizer.zero_grad()
            with self.fabric.no_backward_sync(self.model, enabled=not window_ends):
                self.backward(batch, accumulate)
            if window_ends:
                if edit is not None:
                    edit(self)
                self.optimizer.step()
                if after is not None:
                    after(self)
            self.index += 1
        if isinstance(self.plugin, FabricAmpPrecision):
            self.plugin.flush()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    return [v for state in optimizer.state_dict()["state"].values() for v in state.values() if isinstance(v, Tensor)]
