"""Queues, teachers, centres: state that a step writes by itself."""

from __future__ import annotations

import copy
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


class MoCo(L.LightningModule):
    def __init__(self, dim=16, K=64, m=0.99, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = mlp(32, 64, dim), mlp(32, 64, dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        n, ptr = keys.shape[0], int(self.queue_ptr)
        self.queue[:, ptr : ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    def training_step(self, batch, batch_idx):
        (x_q, x_k), _ = batch
        q = F.normalize(self.encoder_q(x_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(x_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long, device=self.device))
        self._dequeue_and_enqueue(k)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


@project("self-supervised")
def moco_queue() -> Setup:
    """MoCo: a momentum encoder updated through `.data`, and a queue that the step fills."""
    return Setup(MoCo(), loader())


class BYOL(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(mlp(32, 64, 32), mlp(32, 32, 16))
        self.predictor = mlp(16, 32, 16)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    def training_step(self, batch, batch_idx):
        (v1, v2), _ = batch
        p1, p2 = self.predictor(self.online(v1)), self.predictor(self.online(v2))
        with torch.no_grad():
            z1, z2 = self.target(v1), self.target(v2)
        loss = 4 - 2 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tau = 1 - (1 - 0.99) * (math.cos(math.pi * self.global_step / self.trainer.estimated_stepping_batches) + 1) / 2
        with torch.no_grad():
            for o, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
                t.mul_(tau).add_(o, alpha=1 - tau)

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.online.parameters(), *self.predictor.parameters()], lr=1e-3)


@project("self-supervised")
def byol_ema_target() -> Setup:
    """BYOL: an EMA target updated in `on_train_batch_end`, and BatchNorm in all heads."""
    return Setup(BYOL(), loader())


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, hidden=32, bottleneck=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, bottleneck))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class DINO(L.LightningModule):
    def __init__(self, out_dim=64, student_temp=0.1, teacher_temp=0.04):
        super().__init__()
        self.student = nn.Sequential(mlp(32, 64, 32, norm=False), DINOHead(32, out_dim))
        self.teacher = nn.Sequential(mlp(32, 64, 32, norm=False), DINOHead(32, out_dim))
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.student_temp, self.teacher_temp = student_temp, teacher_temp

    def training_step(self, batch, batch_idx):
        views, _ = batch
        teacher_out = self.teacher(torch.cat(views[:2])).chunk(2)
        student_out = [self.student(v) for v in views]
        total, n = 0, 0
        for i, t in enumerate(teacher_out):
            q = F.softmax((t - self.center) / self.teacher_temp, dim=-1).detach()
            for j, s in enumerate(student_out):
                if i != j:
                    total += torch.sum(-q * F.log_softmax(s / self.student_temp, dim=-1), dim=-1).mean()
                    n += 1
        with torch.no_grad():
            batch_center = torch.cat(teacher_out).mean(0, keepdim=True)
            self.center = self.center * 0.9 + batch_center * 0.1
        return total / n

    def on_after_backward(self):
        if self.current_epoch == 0:
            for name, p in self.student.named_parameters():
                if "last_layer" in name:
                    p.grad = None

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                t.data.mul_(0.996).add_((1 - 0.996) * s.detach().data)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.student.parameters() if p.requires_grad], lr=5e-4, weight_decay=0.04)


@project("self-supervised")
def dino_centre_multi_crop() -> Setup:
    """DINO: centre, frozen last layer in epoch 0 by gradients set to `None`, teacher in `on_before_zero_grad`."""
    return Setup(DINO(), loader(views=4), trainer={"max_epochs": 2, "gradient_clip_val": 3.0})


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


class SimCLRHalfSafe(SimCLR):
    """`-9e15` does not go into half precision; who trained with fp16 before writes this."""

    def info_nce(self, feats):
        feats = F.normalize(feats.float(), dim=-1)
        logits = feats @ feats.T * self.logit_scale.exp().clamp(max=100)
        logits = logits - 1e4 * torch.eye(len(feats), device=feats.device)
        target = torch.arange(len(feats), device=feats.device).roll(len(feats) // 2)
        return F.cross_entropy(logits, target)


@project("self-supervised")
def simclr_uva_notebook() -> Setup:
    """SimCLR as in the UvA notebook: masked with -9e15, too large for float16."""
    return Setup(SimCLR(), loader(), trainer={"max_epochs": 2})


@project("self-supervised")
def contrastive_learned_temperature() -> Setup:
    """InfoNCE with a learned temperature, similarities in fp32."""
    return Setup(SimCLRHalfSafe(learn_temperature=True), loader(), trainer={"max_epochs": 2})


class MAE(L.LightningModule):
    """Masked autoencoder on a sequence of patches: random masking by argsort and gather, loss on the masked ones."""

    def __init__(self, patches=16, patch_dim=12, dim=32, mask_ratio=0.75):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.pos = nn.Parameter(torch.randn(1, patches, dim) * 0.02, requires_grad=False)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))

        def layer():
            return nn.TransformerEncoderLayer(
                dim, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )

        self.encoder = nn.ModuleList([layer() for _ in range(2)])
        self.decoder = layer()
        self.head = nn.Linear(dim, patch_dim)

    def random_masking(self, x):
        n, length, d = x.shape
        keep = int(length * (1 - self.mask_ratio))
        noise = torch.rand(n, length, device=x.device)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones(n, length, device=x.device)
        mask[:, :keep] = 0
        return kept, torch.gather(mask, 1, restore), restore

    def training_step(self, batch, batch_idx):
        x = batch.view(len(batch), 16, 12)
        h, mask, restore = self.random_masking(self.patch_embed(x) + self.pos)
        h = torch.cat([self.cls_token.expand(len(h), -1, -1), h], dim=1)
        for block in self.encoder:
            h = block(h)
        masked = self.mask_token.repeat(len(h), restore.shape[1] + 1 - h.shape[1], 1)
        tokens = torch.cat([h[:, 1:], masked.to(h.dtype)], dim=1)
        tokens = torch.gather(tokens, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
        pred = self.head(self.decoder(tokens + self.pos))
        target = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(-1)
        loss = (loss * mask).sum() / mask.sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@project("self-supervised")
def masked_autoencoder() -> Setup:
    """MAE: masking by argsort and gather, loss on the masked patches, linear warm-up."""
    x = torch.randn(48, 16 * 12, generator=torch.Generator().manual_seed(0)).cumsum(1) / 8
    return Setup(MAE(), DataLoader(x, batch_size=8))


class JEPA(L.LightningModule):
    """Predicts the teacher's latent of hidden patches; variance and covariance terms as in VICReg."""

    def __init__(self, dim=32):
        super().__init__()
        self.context = nn.Sequential(nn.Linear(12, dim), nn.GELU(), nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.target = copy.deepcopy(self.context).requires_grad_(False).eval()
        self.pos = nn.Embedding(16, dim)
        self.predictor = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.out = nn.Linear(dim, dim)

    def train(self, mode=True):
        super().train(mode)
        self.target.eval()
        return self

    def training_step(self, batch, batch_idx):
        patches = batch.view(len(batch), 16, 12)
        order = torch.randperm(16, device=self.device)
        seen, hidden = order[:10], order[10:]
        with torch.inference_mode():
            h = self.target(patches[:, hidden])
            h = F.layer_norm(h, (h.size(-1),))
        z = self.context(patches[:, seen]) + self.pos(seen)
        query = self.pos(hidden).expand(len(z), -1, -1)
        p = self.out(self.predictor(query, z, z, need_weights=False)[0])
        prediction = F.smooth_l1_loss(p, h.clone())
        flat = z.reshape(-1, z.size(-1)).float()
        std = F.relu(1 - torch.sqrt(flat.var(0) + 1e-4)).mean()
        centred = flat - flat.mean(0)
        cov = (centred.T @ centred / (len(flat) - 1)).fill_diagonal_(0).pow(2).sum() / flat.size(1)
        self.log_dict({"prediction": prediction, "std": std, "cov": cov})
        return prediction + 0.5 * std + 0.04 * cov

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.context.parameters()), 0.01)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


@project("self-supervised")
def jepa_vicreg() -> Setup:
    """Latent prediction: targets from `inference_mode`, variance and covariance terms, EMA in `optimizer_step`."""
    x = torch.randn(48, 16 * 12, generator=torch.Generator().manual_seed(0)).cumsum(1) / 8
    return Setup(JEPA(), DataLoader(x, batch_size=8), trainer={"gradient_clip_val": 1.0})
