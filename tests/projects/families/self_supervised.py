"""Queues, teachers, centres: state that a step writes by itself."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from projects.registry import Setup, project


class TwoViews(Dataset):
    """Clusters on a sphere; an augmentation is noise and a mask. Fixed by the index, as workers with seeds would be."""

    def __init__(self, n=64, dim=32, views=2, classes=8):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.arange(n) % classes
        self.x = torch.randn(classes, dim, generator=g)[self.labels] + 0.3 * torch.randn(n, dim, generator=g)
        self.views = views

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = self.x[i]
        return [
            (x + 0.2 * torch.randn(x.shape, generator=g)) * (torch.rand(x.shape, generator=g) > 0.2)
            for _ in range(self.views)
        ], self.labels[i]


def mlp(i, h, o, norm=True):
    return nn.Sequential(
        nn.Linear(i, h), nn.BatchNorm1d(h) if norm else nn.Identity(), nn.ReLU(inplace=True), nn.Linear(h, o)
    )


def loader(**kwargs):
    return DataLoader(TwoViews(**kwargs), batch_size=8)


class SimCLR(L.LightningModule):
    def __init__(self, temperature=0.07, learn_temperature=False):
        super().__init__()
        self.encoder, self.projection = mlp(32, 64, 32), mlp(32, 32, 16)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)), requires_grad=learn_temperature)

    def info_nce(self, feats):
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim * self.logit_scale.exp()
        nll = -cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)
        return nll.mean()

    def training_step(self, batch, batch_idx):
        views, _ = batch
        loss = self.info_nce(self.projection(self.encoder(torch.cat(views))))
        self.log_dict({"train_loss": loss, "scale": self.logit_scale.exp().detach()})
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2, eta_min=1e-5)]


@project("self-supervised")
def simclr_uva_notebook() -> Setup:
    """SimCLR as in the UvA notebook: masked with -9e15, too large for float16."""
    return Setup(SimCLR(), loader(), trainer={"max_epochs": 2})
