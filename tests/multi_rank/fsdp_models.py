"""The modules that the FSDP tests train on one device and on several, with the same data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from support import FEATURES, Toy, batches
from support.promises import OPTIMIZERS
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim.lr_scheduler import ExponentialLR


class OnTheCPU(FSDPStrategy):
    """FSDP1 on the CPU: real shards, real collectives.

    torch shards there if it is told to (`device_id=torch.device("cpu")`), and refuses only to choose the CPU by itself.
    Lightning refuses the CPU for exactly the base of this class, and never tells torch.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, FSDP) for module in model.modules()):
            return super()._setup_model(model)
        return FSDP(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )

    # With Lightning's `offload_to_cpu=True`, torch frees tensors on the CPU before it has copied them.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        with self._full():
            return self.model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return super().optimizer_state(optimizer)
        with self._full():
            state = FSDP.optim_state_dict(self.model, optimizer)
            return FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model) if state else state

    def _full(self) -> contextlib.AbstractContextManager[Any]:
        configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
        return FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)


class Shared(Toy):
    """Every rank draws the same batch and takes its share, so that two ranks together see one device's batch."""

    def share(self, batch: Tensor) -> Tensor:
        return batch[self.global_rank :: self.trainer.world_size]

    def sharded(self, module: nn.Module) -> nn.Module:
        """Wrap as a user does in `configure_model`; the strategy of the script gives the device."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, FSDPStrategy) or isinstance(module, FSDP):
            return module
        device = strategy.root_device
        config = strategy.mixed_precision_config
        return FSDP(module, device_id=device, use_orig_params=True, mixed_precision=config)


class Automatic(Shared):
    def __init__(self, optimizer: str) -> None:
        super().__init__(OPTIMIZERS[optimizer])
        self.seen: tuple[str, ...] = ()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen = str(batch.dtype), str(self.net[0].weight.dtype)
        return self.loss(self.share(batch))


class FlatParameters(Automatic):
    """A module for `use_orig_params=False`."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer((self.trainer.model or self).parameters())


class Manual(Shared):
    """Two units wrapped by hand, because FSDP1 forbids a backward inside the forward of its root.

    With `every` > 1, gradients are unscaled after each backward, and the next backward has to scale them again.
    """

    def __init__(self, optimizer: str, clip: float | None = None, every: int = 1) -> None:
        super().__init__(OPTIMIZERS[optimizer])
        self.automatic_optimization = False
        self.clip, self.every = clip, every

    def configure_model(self) -> None:
        for i in (0, 2):
            self.net[i] = self.sharded(self.net[i])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(self.share(batch)) / self.every)
        if self.every > 1:
            self.trainer.precision_plugin.unscale_(optimizer)
        if (batch_idx + 1) % self.every == 0:
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoParts(Shared):
    """A second optimizer for a single number, which only one rank can hold. The fourth batch steps together with the
    fifth.
    """

    def __init__(self, inf_at: Iterable[int] = (), rank: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(1, 1, bias=False)
        self.inf_at, self.rank = set(inf_at), rank

    def configure_model(self) -> None:
        self.net, self.head = self.sharded(self.net), self.sharded(self.head)

    def configure_optimizers(self) -> Any:
        net = [p for name, p in self.named_parameters() if name.startswith("net")]
        head = [p for name, p in self.named_parameters() if name.startswith("head")]
        return [OPTIMIZERS["fused adamw"](net), OPTIMIZERS["adamw"](head)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        batch = self.share(batch)
        loss = nn.functional.mse_loss(self.head(self.net(batch)), batch.sum(1, keepdim=True))
        if batch_idx in self.inf_at and self.global_rank == self.rank % self.trainer.world_size:
            loss = loss * float("inf")
        self.manual_backward(loss)
        if batch_idx == 3:
            return
        for optimizer in (first, second):  # the other optimizer's gradients exist, and must stay out of the norm
            self.clip_gradients(optimizer, 0.1, "norm")
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()


class NamedToy(Shared):
    """BatchNorm, a schedule and validation; records the dtypes in which its layers compute."""

    def __init__(self, nan_at: Iterable[int] = (), rank: int = 0) -> None:
        # no bias before BatchNorm: its gradient is zero except for rounding, and Adam makes it as large as any other
        first = nn.Linear(FEATURES, 16, bias=False)
        net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        super().__init__(OPTIMIZERS["fused adamw"], net, lambda optimizer: ExponentialLR(optimizer, 0.9))
        self.nan_at, self.rank = set(nan_at), rank
        self.dtypes: dict[str, tuple[str, ...]] = {}

    def note(self, step: str, batch: Tensor) -> Tensor:
        first = self.net[0](batch)
        out = self.net[3](self.net[2](self.net[1](first)))
        weights = [p.dtype for p in self.parameters()]
        buffers = [b.dtype for b in self.buffers() if b.is_floating_point()]
        seen = [batch.dtype, first.dtype, out.dtype, *set(weights), *set(buffers)]
        self.dtypes[step] = tuple(str(dtype).removeprefix("torch.") for dtype in seen)
        return nn.functional.mse_loss(out.float(), batch.sum(1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = self.share(batch)
        if batch_idx in self.nan_at and self.global_rank == self.rank % self.trainer.world_size:
            batch = batch * float("nan")
        return self.note("train", batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.note("validate", self.share(batch)), sync_dist=True)


class Overflow(L.Callback):
    """Write inf into one element of one rank's shard in chosen batches."""

    def __init__(self, at: Iterable[int] = (), rank: int = 0) -> None:
        self.at, self.rank, self.batch = set(at), rank, -1

    def on_train_batch_start(self, *args: Any) -> None:
        self.batch += 1

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.batch in self.at and trainer.global_rank == self.rank % trainer.world_size:
            parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            next(p.grad for p in parameters if p.grad is not None and p.grad.numel()).view(-1)[0] = float("inf")


MODULES: dict[str, Any] = {"automatic": Automatic, "flat": FlatParameters, "manual": Manual}


@dataclass(frozen=True)
class Case:
    """A run with autocast off, which has to equal a run in fp32 on one device."""

    precision: str
    optimizer: str = "fused adamw"
    mode: str = "automatic"
    clip: float | None = None
    every: int = 1
    algorithm: str = "norm"
    overflows: tuple[int, ...] = (2,)
    reduce_dtype: torch.dtype = torch.float32
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def trainer(self) -> dict[str, Any]:
        if self.mode == "manual":
            return {}
        clipping = {"gradient_clip_val": self.clip, "gradient_clip_algorithm": self.algorithm}
        return {"accumulate_grad_batches": self.every, **(clipping if self.clip is not None else {})}

    def module(self) -> L.LightningModule:
        manual = {"clip": self.clip, "every": self.every} if self.mode == "manual" else {}
        return MODULES[self.mode](self.optimizer, **manual)

    def data(self) -> Any:
        return batches(6, 8)


CASES = {
    "fp16, fused": Case("fp16"),
    "fp16, fused, clipped": Case("fp16", clip=0.3),
    "fp16, clipped, accumulated": Case("fp16", "adamw", clip=0.3, every=2),
    "fp16, clipped by value": Case("fp16", "sgd", clip=0.02, algorithm="value"),
    "fp16, manual": Case("fp16", mode="manual", clip=0.3),
    "fp16, manual, carried": Case("fp16", "fused sgd", mode="manual", clip=0.3, every=2),
    "bf16, fused, clipped": Case("bf16", "fused sgd", clip=0.3),
    "bf16, manual": Case("bf16", "adamw", mode="manual", clip=0.3),
    "fp32, clipped, accumulated": Case("fp32", clip=0.3, every=2),
    "gradients sharded only": Case("fp16", clip=0.3, every=2, strategy={"sharding_strategy": "SHARD_GRAD_OP"}),
    "nothing sharded": Case("fp16", clip=0.3, strategy={"sharding_strategy": "NO_SHARD"}),
    "flat parameters": Case("fp16", mode="flat", clip=0.3, strategy={"use_orig_params": False}),
    "units": Case("fp16", clip=0.3, every=2, strategy={"auto_wrap_policy": {nn.Linear}}),
    "reduced in bf16": Case("fp16", reduce_dtype=torch.bfloat16),
}
