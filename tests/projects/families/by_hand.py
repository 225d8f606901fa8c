"""Backward, steps and gradients taken into one's own hands, in the ways that people take them."""

from __future__ import annotations

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from projects.families.functional import Classifier, mlp, rows, sinusoids
from projects.registry import Setup, project


class Manual(Classifier):
    def __init__(self, net=None):
        super().__init__(net or mlp())
        self.automatic_optimization = False


class PlainBackward(Manual):
    """`loss.backward()` instead of `manual_backward`: of the loss itself, which nobody scaled."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()
        self.log("loss", loss)


@project("by hand")
def plain_backward() -> Setup:
    """`loss.backward()` and `clip_grad_norm_` in manual optimization."""
    return Setup(PlainBackward(), rows())


class ScoreDistillation(L.LightningModule):
    """DreamFusion: the gradient of an image is known, `backward(gradient=...)` takes it to the scene."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scene = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 12))
        self.prior = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 12)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (camera,) = batch
        optimizer = self.optimizers()
        image = self.scene(camera)
        with torch.no_grad():
            noise = torch.randn(image.shape, device=self.device)
            gradient = torch.nan_to_num(0.1 * (self.prior(image + noise) - noise))
        optimizer.zero_grad()
        self.manual_backward(image, gradient=gradient, retain_graph=True)
        optimizer.step()
        self.log("norm", gradient.float().norm())

    def configure_optimizers(self):
        return torch.optim.Adam(self.scene.parameters(), lr=1e-2)


@project("by hand")
def score_distillation_backward_with_gradient() -> Setup:
    """`manual_backward(image, gradient=...)` on a tensor that is not a scalar."""
    camera = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    return Setup(ScoreDistillation(), DataLoader(TensorDataset(camera), batch_size=8))


class ForceField(L.LightningModule):
    """Energies and forces: the derivative is an output, in the validation too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("centres", torch.linspace(0, 4, 8))

    def forward(self, pos):
        pos = pos.detach().requires_grad_(True)
        i, j = torch.triu_indices(pos.size(1), pos.size(1), 1, device=pos.device)
        distance = (pos[:, i] - pos[:, j]).norm(dim=-1)
        energy = self.net(torch.exp(-(distance.unsqueeze(-1) - self.centres).square())).sum((1, 2))
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -gradient

    def step(self, batch, stage):
        pos, e, f = batch
        energy, forces = self(pos)
        loss = F.mse_loss(energy, e) + 10 * F.mse_loss(forces, f)
        self.log_dict({f"{stage}_loss": loss, f"{stage}_force_mae": (forces - f).abs().mean()})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    @torch.enable_grad()
    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, amsgrad=True)


@project("by hand", quick=True)
def molecular_forces() -> Setup:
    """Forces as the derivative of an energy, in training and, with `inference_mode=False`, in validation."""
    pos = torch.rand(48, 4, 3, generator=torch.Generator().manual_seed(0)) * 3
    pos.requires_grad_(True)
    i, j = torch.triu_indices(4, 4, 1)
    energy = (pos[:, i] - pos[:, j]).norm(dim=-1).sub(1.5).square().sum(1)
    forces = -torch.autograd.grad(energy.sum(), pos)[0]
    data = DataLoader(TensorDataset(pos.detach(), energy.detach(), forces), batch_size=8)
    return Setup(ForceField(), data, data, trainer={"inference_mode": False, "gradient_clip_val": 10.0})


class Reptile(Manual):
    """Deep copies of the net learn with an optimizer of their own; the net goes towards them."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))

    def training_step(self, batch, batch_idx):
        optimizer, losses = self.optimizers(), []
        optimizer.zero_grad()
        for xs, ys, _, _ in zip(*batch, strict=True):
            fast = copy.deepcopy(self.net)
            inner = torch.optim.SGD(fast.parameters(), lr=0.02)
            for _ in range(5):
                loss = F.mse_loss(fast(xs), ys)
                inner.zero_grad()
                loss.backward()
                inner.step()
            losses.append(F.mse_loss(fast(xs), ys).detach())
            for p, q in zip(self.net.parameters(), fast.parameters(), strict=True):
                p.grad = (p.grad if p.grad is not None else 0) + (p - q).detach() / len(xs)
        optimizer.step()
        self.log("loss", torch.stack(losses).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@project("by hand", quick=True)
def reptile_deep_copies() -> Setup:
    """Deep copies of the module, trained inside of the step by their own optimizer."""
    return Setup(Reptile(), DataLoader(sinusoids(), batch_size=4))


class Progressive(Classifier):
    """New layers in epoch 1: the optimizers are set up again, as progressive growing does."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(1)
            self.net.insert(1, nn.Linear(16, 16))
            self.trainer.strategy.setup_optimizers(self.trainer)
        if self.current_epoch == 2:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05)]


@project("by hand", quick=True)
def growing_net_new_optimizers() -> Setup:
    """One more layer and new optimizers in epoch 1, another optimizer in epoch 2."""
    return Setup(Progressive(), rows(16), trainer={"max_epochs": 3})
