"""Diffusion, flows, autoencoders, adversaries, energies."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from projects.learner import Learner
from projects.registry import Setup, project


def two_moons(n=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = math.pi * torch.rand(n, generator=g)
    side = torch.randint(0, 2, (n,), generator=g)
    x = torch.stack([torch.cos(t) * (1 - 2 * side) + side, torch.sin(t) * (1 - 2 * side) + 0.5 * side], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


def points(n=64, batch_size=8):
    return DataLoader(TensorDataset(two_moons(n)), batch_size=batch_size)


def images(n=32, batch_size=8):
    g = torch.Generator().manual_seed(1)
    centre = torch.rand(n, 1, 2, generator=g)
    grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 6), torch.linspace(0, 1, 6), indexing="ij"), -1).view(
        1, 36, 2
    )
    return DataLoader(TensorDataset(torch.exp(-8 * (grid - centre).square().sum(-1))), batch_size=batch_size)


class VAE(Learner):
    def __init__(self, latent=4, beta=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 36))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        eps = torch.randn(mu.shape, device=mu.device)
        return self.decoder(mu + eps * torch.exp(0.5 * logvar)), mu, logvar

    def training_step(self, batch, batch_idx):
        (x,) = batch
        logits, mu, logvar = self(x)
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = bce + self.hparams.beta * kld
        self.log_dict({"bce": bce, "kld": kld, "loss": loss})
        return {"loss": loss, "mu": mu.detach()}


@project("generative")
def vae_summed_loss() -> Setup:
    """A VAE whose loss is summed over pixels."""
    return Setup(VAE(), images())


def critic():
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def generator(latent=4):
    return nn.Sequential(nn.Linear(latent, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


class GAN(L.LightningModule):
    def __init__(self, latent_dim=4, lr=2e-4, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = generator(latent_dim), critic()

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (imgs,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        kwargs = {"lr": self.hparams.lr, "betas": (self.hparams.b1, self.hparams.b2)}
        return [
            torch.optim.Adam(self.generator.parameters(), **kwargs),
            torch.optim.Adam(self.discriminator.parameters(), **kwargs),
        ], []


@project("generative")
def gan_lightning_tutorial() -> Setup:
    """Lightning's GAN tutorial: manual optimization with toggled optimizers."""
    return Setup(GAN(), points())
