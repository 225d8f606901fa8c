"""Modules whose weights stay gathered between steps, or whose `backward` is their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from multi_rank.ranks import whole
from multi_rank.second_run_modules import WIDTH, Block, Split
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


class Adversaries(Split):
    """A GAN that toggles its optimizers.

    FSDP2 gathers the last layer of the generator without gradients in the second half of each step, and keeps it so.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Block(), nn.Linear(16, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 16), Block(), nn.Linear(16, 1))

    def configure_model(self) -> None:
        if not self.is_split:
            super().configure_model()
            self.shard(self.judge)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch_idx)
        first, second = self.optimizers()
        for optimizer, sign in ((first, -1), (second, 1)):
            self.toggle_optimizer(optimizer)
            made = self.net(torch.randn_like(batch[0]))
            loss = F.softplus(sign * self.judge(made).float()).mean()
            if sign > 0:
                loss = loss + F.softplus(-self.judge(batch[0]).float()).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss.detach())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(-batch_idx)
        self.log("val_loss", self.judge(self.net(batch[0])).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (self.net, self.judge)]


class Follower(Split):
    """A teacher follows after each step. Its weights are gathered in its first forward, and never freed.

    Half of its weights follow as they are gathered. The code also changes the shards of the others, which has no effect
    on the gathered weights.
    """

    def build(self) -> None:
        super().build()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)

    def configure_model(self) -> None:
        if not self.is_split:
            super().configure_model()
            self.shard(self.teacher)
            self.shards = list(self.teacher[2].parameters())

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return F.mse_loss(self.net(batch[0]).float(), target.float())

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        assert not any(isinstance(parameter, DTensor) for parameter in self.teacher.parameters())
        for mine, theirs in zip(self.teacher[0].parameters(), self.net[0].parameters(), strict=True):
            mine.lerp_(whole(theirs).to(mine.dtype), 0.5)
        for shard in self.shards:
            shard.mul_(3)


class Edited(Split):
    """Changes all weights before each batch of validation. FSDP1 gathers the outermost unit in the first batch only."""

    def on_validation_batch_start(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.trained():
                parameter.mul_(0.9)


class ParallelLoss(Split):
    """Tensor parallel logits stay sharded, so the backward must run in `loss_parallel()`, too."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Block(dropout=self.dropout), nn.Linear(16, 16))

    def configure_model(self) -> None:
        if not self.is_split:
            plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(self.net[2], self.device_mesh["tensor_parallel"], plan)
        super().configure_model()

    def loss(self, batch: Any) -> Tensor:
        with loss_parallel():
            loss: Any = F.cross_entropy(self.net(batch[0]), batch[1][:, 0] % 16)
            return loss.full_tensor()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            loss.backward(*args, **kwargs)
