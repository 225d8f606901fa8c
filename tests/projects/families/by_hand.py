"""Backward, steps and gradients taken into one's own hands, in the ways that people take them."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from projects.families.functional import MAML, Classifier, mlp, rows, sinusoids
from projects.learner import Learner
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


class ManualClosure(Manual):
    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = F.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.log("loss", loss)
            return loss

        optimizer.step(closure=closure)


@project("by hand", quick=True)
def closure_in_manual_optimization() -> Setup:
    """`optimizer.step(closure=...)` in manual optimization."""
    return Setup(ManualClosure(), rows())


class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer, schedule, every = self.optimizers(), self.lr_schedulers(), 2
        loss = F.cross_entropy(self(x), y) / every
        self.manual_backward(loss)
        if (batch_idx + 1) % every == 0 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@project("by hand")
def accumulation_in_manual_optimization() -> Setup:
    """Accumulation by hand with clipping and a schedule; the last window is shorter."""
    return Setup(ManualAccumulation(), rows(n=60))


class Hooks(Classifier):
    """The hooks of the documentation: warm-up in `optimizer_step`, own clipping, gradient norms logged."""

    def __init__(self):
        super().__init__(mlp())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 4) * self.lr

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm=None):
        self.norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)

    def on_after_backward(self):
        assert all(p.grad is not None for p in self.net.parameters())

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@project("by hand")
def documented_hooks() -> Setup:
    """Warm-up in `optimizer_step`, clipping by an override, `grad_norm` logged, gradients zeroed and not freed."""
    return Setup(Hooks(), rows())


class SAM(Manual):
    """Sharpness-aware minimisation in two manual passes."""

    def training_step(self, batch, batch_idx, rho=0.05):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(x), y))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.net.parameters()]).norm()
            moves = [p.grad * (rho / (norm + 1e-12)) for p in self.net.parameters()]
            for p, e in zip(self.net.parameters(), moves, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            for p, e in zip(self.net.parameters(), moves, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)


@project("by hand")
def sharpness_aware_two_passes() -> Setup:
    """SAM by hand: the step moves the weights along the gradient between two forwards, and then back."""
    return Setup(SAM(), rows())


class GradNorm(Classifier):
    """Loss weights from the norms of each task's gradient on the last shared layer."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])
        self.weights = nn.Parameter(torch.ones(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.net(x)
        losses = torch.stack([F.cross_entropy(self.heads[0](h), y), F.mse_loss(self.heads[1](h)[:, 0], x.sum(1))])
        shared = self.net[-1].weight
        norms = torch.stack(
            [torch.autograd.grad(weighted, shared, create_graph=True)[0].norm() for weighted in self.weights * losses]
        )
        target = norms.mean().detach()
        return (self.weights.detach() * losses).sum() + (norms - target).abs().sum()


@project("by hand")
def gradnorm_create_graph() -> Setup:
    """GradNorm: `autograd.grad(create_graph=True)` of weighted losses with respect to a weight."""
    return Setup(GradNorm(), rows())


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


class Adversarial(Classifier):
    """FGSM by `autograd.grad` and virtual adversarial training by `backward`, in one automatic step."""

    def __init__(self):
        super().__init__(mlp())

    def fgsm(self, x, y, epsilon=0.1):
        x = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return (x + epsilon * gradient.sign()).detach()

    def vat(self, x, xi=1.0, epsilon=0.5):
        with torch.no_grad():
            p = F.softmax(self(x), dim=1)
        d = F.normalize(torch.randn(x.shape, device=x.device), dim=1).requires_grad_()
        F.kl_div(F.log_softmax(self(x + xi * d), dim=1), p, reduction="batchmean").backward()
        d = F.normalize(d.grad, dim=1)
        self.zero_grad()
        return F.kl_div(F.log_softmax(self(x + epsilon * d), dim=1), p, reduction="batchmean")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(self.fgsm(x, y)), y) + self.vat(x)


@project("by hand")
def adversarial_fgsm_and_vat() -> Setup:
    """Adversarial examples by `autograd.grad`, and virtual adversarial examples by a `backward` inside of the step."""
    return Setup(Adversarial(), rows())


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


class ForwardMode(MAML):
    """A directional derivative in forward mode, as a penalty."""

    def training_step(self, batch, batch_idx):
        x, y = batch[0].flatten(0, 1), batch[1].flatten(0, 1)
        params = dict(self.net.named_parameters())
        out, slope = jvp(lambda x: functional_call(self.net, params, (x,)), (x,), (torch.ones_like(x),))[:2]
        return F.mse_loss(out, y) + 0.01 * slope.square().mean()


@project("by hand")
def forward_mode_jvp() -> Setup:
    """`torch.func.jvp` in the step."""
    return Setup(ForwardMode(), DataLoader(sinusoids(), batch_size=4))


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


class Unfreezing(Classifier):
    """Groups are added while it trains, weights replaced, a step of the plain optimizer avoided."""

    def __init__(self):
        super().__init__(mlp())
        self.net[:2].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            return -1 if self.current_epoch == 0 else None
        if self.current_epoch == 1 and batch_idx == 0:
            self.net[:2].requires_grad_(True)
            self.optimizers().add_param_group({"params": self.net[:2].parameters(), "lr": 1e-4})
            with torch.no_grad():
                self.net[4].bias.data = torch.zeros_like(self.net[4].bias)
        return None

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


@project("by hand")
def unfreezing_with_a_new_group() -> Setup:
    """A new parameter group in epoch 1, replaced `.data`, and an epoch that ends early by `return -1`."""
    return Setup(Unfreezing(), rows(12), trainer={"max_epochs": 2})


class Packed(NamedTuple):
    sequences: object
    target: Tensor
    mask: Tensor | None


def collate_packed(samples):
    samples = sorted(samples, key=lambda s: -len(s[0]))
    return Packed(pack_sequence([s[0] for s in samples]), torch.stack([s[1] for s in samples]), None)


class PackedBatches(Classifier):
    def __init__(self):
        super().__init__(nn.GRU(4, 16))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        _, h = self.net(batch.sequences.to(dtype=torch.float32))
        return F.mse_loss(self.head(h[-1]).squeeze(1), batch.target.float())


@project("by hand")
def packed_float64_named_tuples() -> Setup:
    """Named tuples with a `PackedSequence` in float64 and a `None`."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (24,), generator=g).tolist()
    x = [torch.randn(k, 4, generator=g, dtype=torch.float64) for k in lengths]
    return Setup(PackedBatches(), DataLoader([(s, s.sum() / 4) for s in x], batch_size=6, collate_fn=collate_packed))


class DropoutCheckpoint(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 64)))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(checkpoint(self.net, x, use_reentrant=False))


@project("by hand")
def dropout_in_a_checkpointed_block() -> Setup:
    """Dropout in a checkpointed block, whose forward runs again in the backward."""
    return Setup(DropoutCheckpoint(), rows(), rows(seed=1))


class DeepKernel(Learner):
    """A Gaussian process on learned features: Cholesky of the kernel, in fp32 as one has to."""

    lr = 1e-2

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-2.0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.features(x).float()
        k = torch.exp(self.log_scale - 0.5 * torch.cdist(z, z).square())
        k = k + self.log_noise.exp() * torch.eye(len(z), device=z.device)
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y.unsqueeze(1), chol)
        nll = 0.5 * (y @ alpha.squeeze(1)) + chol.diagonal().log().sum() + 0.5 * len(y) * math.log(2 * math.pi)
        self.log("nll", nll / len(y))
        return nll


@project("by hand")
def gaussian_process_cholesky() -> Setup:
    """Deep kernel learning: `cdist` and a Cholesky factor inside of the loss."""
    x = torch.rand(48, 2, generator=torch.Generator().manual_seed(0)) * 4
    return Setup(DeepKernel(), DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=16))


class PaddedEncoder(Classifier):
    """`nn.TransformerEncoder` with a padding mask: in evaluation it takes another path."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.inp, self.encoder, self.head = nn.Linear(8, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x):
        x = x.unsqueeze(1) * torch.linspace(1, 0.1, 6, device=x.device)[:, None]
        padding = torch.arange(6, device=x.device) >= 2 + (x[:, 0, :1] > 0).long() * 3
        h = self.encoder(self.inp(x), src_key_padding_mask=padding)
        return self.head(h[:, 0])


@project("by hand")
def transformer_encoder_padding_mask() -> Setup:
    """`nn.TransformerEncoder` with a padding mask, in training and validation."""
    return Setup(PaddedEncoder(), rows(), rows(seed=1))


class CastsItsWeight(Classifier):
    """A parameter that the module itself casts to the dtype of what comes in, as metric learning libraries do."""

    def __init__(self):
        super().__init__(mlp(o=16))
        self.proxies = nn.Parameter(F.normalize(torch.randn(4, 16), dim=1))

    def forward(self, x):
        z = self.net(x)
        self.proxies.data = self.proxies.data.to(z.dtype)
        return 4 * F.normalize(z, dim=1) @ F.normalize(self.proxies, dim=1).t()


@project("by hand")
def weight_cast_by_its_module() -> Setup:
    """`self.proxies.data = self.proxies.data.to(x.dtype)` in the forward."""
    return Setup(CastsItsWeight(), rows())
