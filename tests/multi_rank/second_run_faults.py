"""Modules with one fault in the third batch, on one rank. `second_run_scenarios.py` trains them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from multi_rank.ranks import Infinite
from multi_rank.second_run_modules import SIZE, WIDTH, Block, Split
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

AT = 2


class Faulty(Split):
    """Has a fault on one rank in the third training batch; `part` is a module of it."""

    def __init__(self, layout: str, rank: int = 1, part: type[nn.Module] = nn.Identity) -> None:
        self.rank, self.part = rank, part
        super().__init__(layout, dropout=0.0)

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Inside(), self.part(), nn.Linear(16, 1))

    @property
    def is_here(self) -> bool:
        return self.training and self.seen[-1] == AT and self.global_rank == self.rank

    def loss(self, batch: Any) -> Tensor:
        for module in self.net.modules():
            if isinstance(module, Switch):
                module.on = self.is_here
        return super().loss(batch)


class Switch(nn.Module):
    on = False


class Inside(Block):
    """A block with a place for a fault between its two layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.middle: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(F.gelu(self.up(self.norm(x)))))


class Data(Faulty):
    def loader(self, training: bool = True) -> Any:
        loader = super().loader(training)
        if training and self.replica == self.rank:
            loader.dataset.tensors[0][AT * SIZE + 1, 3] = torch.nan
        return loader


class Weight(Faulty):
    """One value of one rank's shard is NaN."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[1].up.weight
        if batch_idx == AT and self.global_rank == self.rank:
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] = torch.nan


class Amplify(Switch):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 2) * 6e4 if self.on else x


class Shard(Faulty):
    """The values between two layers of a block are too large on one rank."""

    def build(self) -> None:
        super().build()
        self.net[1].middle = Amplify()


class Backward(Faulty):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return Infinite.apply(loss) if self.is_here else loss


class Loss(Faulty):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + torch.log(loss.detach() * 0 - 1) if self.is_here else loss


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Buffer(Faulty):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == AT and self.global_rank == self.rank:
            self.net[2].factor[3] = torch.nan


class Masked(Switch):
    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.T
        mask = torch.full_like(scores, -torch.inf) if self.on else torch.zeros_like(scores)
        return torch.softmax(scores + mask, -1).to(x.dtype) @ x


class Root(Switch):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(x.relu() * 0) if self.on else x


class Entropy(Faulty):
    """The sum of the losses of four rows does not fit into fp16."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.is_here:
            x = self.net[0](batch[0]) * 0
            with torch.autocast("cpu", enabled=False):
                far = x + torch.arange(16, dtype=x.dtype) * -2e3
                loss = loss + F.cross_entropy(far, torch.full((len(x),), 15), reduction="sum")
        return loss


class Contrast(Faulty):
    """Each rank computes its loss with the rows of all ranks. Bad rows of one rank make the losses of all bad.

    A Function that takes part in a step also sends gradients of all ranks to each rank.
    """

    def loss(self, batch: Any) -> Tensor:
        rows = self.net(batch[0]).float()
        if self.is_here:
            rows = torch.log(rows * 0 - 1)
        everybodys = self.all_gather(rows, sync_grads=True)
        return everybodys.square().mean() + super().loss(batch)


class ContrastInBackward(Faulty):
    def loss(self, batch: Any) -> Tensor:
        loss = self.all_gather(self.net(batch[0]).float(), sync_grads=True).square().mean()
        return loss + torch.log(loss.detach() * 0 - 1) * loss if self.is_here else loss


class OfTwoRanks(Faulty):
    """On the other rank the loss scale is too high for the same step. FSDP2 adds up their gradients.

    A loss that is `detached` is not finite, but its gradients are.
    """

    def __init__(self, layout: str, detached: bool) -> None:
        self.detached = detached
        super().__init__(layout)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.is_here:
            part = loss.detach() if self.detached else loss
            return loss + part / (part * 0)
        return loss * 1e3 if self.training and self.seen[-1] == AT else loss


class InValidation(Faulty):
    @property
    def is_here(self) -> bool:
        return not self.training and self.global_rank == self.rank


class Swapped(InValidation):
    """Validates with other weights, as averaged weights do, and swaps them out in a hook of its own."""

    @torch.no_grad()
    def scale_weights(self, factor: float) -> None:
        for parameter in self.trainer.optimizers[0].param_groups[0]["params"]:
            parameter.mul_(factor)

    def on_validation_epoch_start(self) -> None:
        self.scale_weights(0.5)

    def on_validation_epoch_end(self) -> None:
        self.scale_weights(2.0)
