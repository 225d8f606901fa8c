"""Agents that play in the training step, replay that grows while it is read, several optimizers by hand."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from projects.registry import Setup, project


def rollouts(n=64, actions=2):
    """Recorded ones, so that all precisions learn from the same."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(n, 4, generator=g)
    taken = torch.randint(0, actions, (n,), generator=g)
    returns = states[:, 0] * (taken.float() * 2 - 1) + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(states, taken, returns, torch.full((n,), 0.5).log())


class PPO(L.LightningModule):
    """Several epochs of minibatches inside of one training step; CleanRL's losses."""

    def __init__(self, update_epochs=3, minibatches=2, clip=0.2):
        super().__init__()
        self.automatic_optimization = False
        self.update_epochs, self.minibatches, self.clip = update_epochs, minibatches, clip
        self.trunk, self.policy, self.value = (
            nn.Sequential(nn.Linear(4, 32), nn.Tanh()),
            nn.Linear(32, 2),
            nn.Linear(32, 1),
        )
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def training_step(self, batch, batch_idx):
        states, actions, returns, _ = batch
        optimizer = self.optimizers()
        with torch.no_grad():
            h = self.trunk(states)
            old_logprob = Categorical(logits=self.policy(h)).log_prob(actions)
            old_value = self.value(h).squeeze(-1)
        advantages = returns - old_value
        for _ in range(self.update_epochs):
            for mb in torch.randperm(len(states), device=self.device).chunk(self.minibatches):
                h = self.trunk(states[mb])
                dist = Categorical(logits=self.policy(h))
                ratio = (dist.log_prob(actions[mb]) - old_logprob[mb]).exp()
                adv = (advantages[mb] - advantages[mb].mean()) / (advantages[mb].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - self.clip, 1 + self.clip)).mean()
                v_loss = 0.5 * (self.value(h).squeeze(-1) - returns[mb]).pow(2).mean()
                loss = pg_loss + 0.5 * v_loss - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.log("value", v_loss)
        schedule = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2.5e-3, eps=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)]


@project("reinforcement")
def ppo_epochs_in_a_step() -> Setup:
    """PPO: six clipped optimizer steps in one training step."""
    return Setup(PPO(), DataLoader(rollouts(), batch_size=16))
