"""One weight, many uses: in numbers that change, without a gradient first, and edited in between."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from projects.families.by_hand import Manual
from projects.families.functional import sinusoids
from projects.registry import Setup, project


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
