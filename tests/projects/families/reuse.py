"""One weight, many uses: in numbers that change, without a gradient first, and edited in between."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from projects.families.by_hand import Manual
from projects.families.functional import Classifier, mlp, rows, sinusoids
from projects.registry import Setup, project


class RandomDepth(Classifier):
    """A block that is used once, or eight times, as the batch has it (recurrent depth)."""

    def __init__(self):
        super().__init__(nn.Linear(8, 32))
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x, depth=4):
        h = self.net(x)
        for _ in range(depth):
            h = h + self.block(h)
        return self.head(h)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x, random.Random(batch_idx).choice([1, 8, 3])), y)


@project("reuse", quick=True)
def random_recurrent_depth() -> Setup:
    """A block that is used once in one batch and eight times in another."""
    return Setup(RandomDepth(), rows(), rows(seed=1))


class SelfDistillation(Classifier):
    """The same net under `no_grad` first, then twice with gradient (R-Drop, consistency, double DQN)."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            target = F.softmax(self(x) / 2, dim=1)
        weak, strong = self(x + 0.01), self(x * (torch.arange(8, device=x.device) % 3 > 0))
        with torch.no_grad():
            confident = target.max(1).values > 0.2
        consistency = F.kl_div(F.log_softmax(strong, 1), target, reduction="none").sum(1)
        return F.cross_entropy(weak, y) + (consistency * confident).mean()


@project("reuse")
def no_grad_first() -> Setup:
    """The step calls a net first under `no_grad`, and then with a gradient."""
    return Setup(SelfDistillation(mlp()), rows(), rows(seed=1))


class EvolutionStrategies(Manual):
    """No backward at all: weights moved to and fro, the gradient estimated from the losses."""

    def training_step(self, batch, batch_idx, sigma=0.1, pairs=8):
        x, y = batch
        optimizer, params = self.optimizers(), list(self.net.parameters())
        noise = torch.Generator(x.device).manual_seed(batch_idx)
        gradients = [torch.zeros_like(p) for p in params]
        with torch.no_grad():
            for _ in range(pairs):
                eps = [torch.randn(p.shape, generator=noise, device=p.device) * sigma for p in params]
                up, down, loss = (self.loss_at(x, y, params, eps, sign) for sign in (1, -2, 1))
                for g, e in zip(gradients, eps, strict=True):
                    g.add_(e * (up - down) / (2 * pairs * sigma**2))
                self.log("loss", loss)
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer.step()

    def loss_at(self, x, y, params, eps, sign):
        for p, e in zip(params, eps, strict=True):
            p.add_(e, alpha=sign)
        return F.cross_entropy(self(x), y).float()


@project("reuse", quick=True)
def evolution_strategies() -> Setup:
    """Weights moved in place between the forwards of one step, under `no_grad`."""
    return Setup(EvolutionStrategies(nn.Linear(8, 4)), rows())


class ReptileInPlace(Manual):
    """OpenAI's notebook: the net itself is trained through `.data`, then goes back, and towards where it was."""

    def training_step(self, batch, batch_idx, inner_lr=0.02):
        losses, optimizer = [], self.optimizers()
        before = copy.deepcopy(self.net.state_dict())
        moved = {n: torch.zeros_like(v) for n, v in before.items()}
        for xs, ys, _, _ in zip(*batch, strict=True):
            for _ in range(5):
                self.net.zero_grad()
                F.mse_loss(self.net(xs), ys).backward()
                for p in self.net.parameters():
                    p.data -= inner_lr * p.grad.data
            with torch.no_grad():
                losses.append(F.mse_loss(self.net(xs), ys))
            for n, p in self.net.named_parameters():
                moved[n] += (before[n] - p.detach()) / len(batch[0])
            self.net.load_state_dict(before)
        for n, p in self.net.named_parameters():
            p.grad = moved[n]
        optimizer.step()
        self.log("loss", torch.stack(losses).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@project("reuse")
def reptile_through_data() -> Setup:
    """The net itself is trained inside of the step, through `p.data -= ...`, which no version counter notices."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return Setup(ReptileInPlace(net), DataLoader(sinusoids(), batch_size=4))


class ClippedCritic(Manual):
    """Forwards with `.data` edits in between and no backward: a max-norm constraint between two uses."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        with torch.no_grad():
            free = F.cross_entropy(self(x), y)
        for p in self.net.parameters():
            p.data.clamp_(-0.1, 0.1)
        loss = F.cross_entropy(self(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log_dict({"free": free, "loss": loss})


@project("reuse", quick=True)
def weights_clamped_through_data() -> Setup:
    """`p.data.clamp_(...)` between two forwards of one step."""
    return Setup(ClippedCritic(), rows())
