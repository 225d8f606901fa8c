"""Functional calls, compiled and checkpointed submodules, parametrizations, odd dtypes."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from projects.learner import Learner
from projects.registry import Setup, project


def table(n=48, d=8, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    return TensorDataset(x, x[:, :classes].argmax(1))


def rows(batch_size=8, **kwargs):
    return DataLoader(table(**kwargs), batch_size=batch_size)


class Classifier(Learner):
    """What the projects below have in common: `forward`, cross entropy, Adam."""

    def __init__(self, net=None):
        super().__init__()
        if net is not None:
            self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))


def mlp(i=8, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, o))


def sinusoids(tasks=24, shots=5):
    g = torch.Generator().manual_seed(0)
    amplitude = 0.5 + 2 * torch.rand(tasks, 1, 1, generator=g)
    phase = math.pi * torch.rand(tasks, 1, 1, generator=g)
    x = 5 * torch.rand(tasks, 2 * shots, 1, generator=g) - 2.5
    y = amplitude * torch.sin(x + phase)
    return TensorDataset(x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:])


class MAML(Learner):
    def __init__(self, inner_lr=0.05, inner_steps=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.inner_lr, self.inner_steps = inner_lr, inner_steps

    def training_step(self, batch, batch_idx):
        params = dict(self.net.named_parameters())

        def loss_fn(params, x, y):
            return F.mse_loss(functional_call(self.net, params, (x,)), y)

        def task(xs, ys, xq, yq):
            adapted = params
            for _ in range(self.inner_steps):
                grads = grad(loss_fn)(adapted, xs, ys)
                adapted = {n: p - self.inner_lr * grads[n] for n, p in adapted.items()}
            return loss_fn(adapted, xq, yq)

        return vmap(task)(*batch).mean()


@project("functional")
def maml_vmap_of_func_grad() -> Setup:
    """MAML over all tasks at once: `vmap` and `torch.func.grad` in the step."""
    return Setup(MAML(), DataLoader(sinusoids(), batch_size=4))


class Compiled(Classifier):
    def __init__(self, backend):
        super().__init__()
        self.net = torch.compile(
            nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)), backend=backend
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.net(x))


@project("functional", timeout_s=400)
def compiled_submodule_aot_eager() -> Setup:
    """A submodule under `torch.compile`, traced with its backward."""
    torch._dynamo.reset()
    return Setup(Compiled("aot_eager"), rows(), rows(seed=1))


class Checkpointed(Classifier):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inp, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.blocks = nn.ModuleList([self.block, nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), self.block])

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=self.use_reentrant)
        return self.head(h)


@project("functional", quick=True)
def checkpointing_not_reentrant() -> Setup:
    """Gradient checkpointing, not reentrant, with a block that is used twice."""
    return Setup(Checkpointed(False), rows(), rows(seed=1))


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class LinearFunction(torch.autograd.Function):
    """The one of torch's tutorial, with the decorators for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, input, weight, bias):
        ctx.save_for_backward(input, weight)
        return input.mm(weight.t()) + bias

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        return grad_output.mm(weight), grad_output.t().mm(input), grad_output.sum(0)


class DomainAdversarial(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
        self.label, self.domain = nn.Linear(16, 4), nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        (x, y), (target, _) = batch["source"], batch["target"]
        p = self.trainer.global_step / 12
        alpha = 2.0 / (1.0 + math.exp(-10 * p)) - 1
        h = self.net(torch.cat([x, target]))
        reversed_h = GradientReversal.apply(h, alpha)
        domain = LinearFunction.apply(reversed_h, self.domain.weight, self.domain.bias)
        d = torch.arange(2, device=x.device).repeat_interleave(torch.tensor([len(x), len(target)], device=x.device))
        return F.cross_entropy(self.label(h[: len(x)]), y) + F.cross_entropy(domain, d)


@project("functional")
def gradient_reversal_combined_loader() -> Setup:
    """Custom autograd functions (one with `custom_fwd`), and batches of a `CombinedLoader` with unequal loaders."""
    loaders = CombinedLoader({"source": rows(), "target": rows(5, n=30, seed=1)}, "max_size_cycle")
    return Setup(DomainAdversarial(), loaders)


class FourierLayer(nn.Module):
    """A complex weight on the lowest modes, as in Fourier neural operators."""

    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)

    def forward(self, x):
        ft = torch.fft.rfft(x.float())
        out = torch.zeros_like(ft)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", ft[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(L.LightningModule):
    def __init__(self, width=8, modes=6):
        super().__init__()
        self.lift, self.project = nn.Linear(2, width), nn.Linear(width, 1)
        self.spectral = nn.ModuleList([FourierLayer(width, modes) for _ in range(2)])
        self.skip = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        u, target = batch
        grid = torch.linspace(0, 1, u.size(1), device=u.device).expand_as(u)
        h = self.lift(torch.stack([u, grid], dim=-1))
        for spectral, skip in zip(self.spectral, self.skip, strict=True):
            h = F.gelu(spectral(h.transpose(1, 2)).transpose(1, 2) + skip(h))
        out = self.project(h).squeeze(-1)
        loss = torch.mean(torch.norm(out - target, dim=1) / torch.norm(target, dim=1))
        self.log("rel_l2", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-4)


@project("functional")
def fourier_neural_operator() -> Setup:
    """FFT layers with complex parameters."""
    u = torch.randn(32, 24, generator=torch.Generator().manual_seed(0)).cumsum(1)
    return Setup(FNO(), DataLoader(TensorDataset(u, u.roll(1, 1) - u.mean(1, keepdim=True)), batch_size=8))


class PINN(Learner):
    """u'' = -pi^2 sin(pi x), u(0) = u(1) = 0; all in the default precision of the parameters."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x = x.requires_grad_(True)
        u = self.net(x)
        du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        d2u = torch.autograd.grad(du, x, torch.ones_like(du), create_graph=True)[0]
        residual = d2u + math.pi**2 * torch.sin(math.pi * x)
        ends = self.net(x.new_tensor([[0.0], [1.0]]))
        loss = residual.pow(2).mean() + 10 * ends.pow(2).mean()
        self.log("loss", loss)
        return loss


@project("functional")
def physics_informed_second_derivatives() -> Setup:
    """A physics-informed net with second derivatives."""
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(0))
    return Setup(PINN(), DataLoader(TensorDataset(x), batch_size=16))


class PCGrad(Learner):
    """Gradient surgery by hand: the tasks' gradients one by one, projected, put into `.grad`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])

    def losses(self, batch):
        x, y = batch
        h = self.trunk(x)
        return [F.cross_entropy(self.heads[0](h), y), F.mse_loss(self.heads[1](h).squeeze(1), x.sum(1))]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        params, gradients = list(self.parameters()), []
        losses = self.losses(batch)
        for loss in losses:
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
        flat = [torch.cat([g.flatten() for g in grads]) for grads in gradients]
        projected = [f.clone() for f in flat]
        for i, j in ((0, 1), (1, 0)):
            dot = projected[i] @ flat[j]
            if dot < 0:
                projected[i] -= dot / (flat[j] @ flat[j]) * flat[j]
        merged = sum(projected).split([p.numel() for p in params])
        for p, g in zip(params, merged, strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        self.log_dict({"task_0": losses[0], "task_1": losses[1]})


@project("multi-task")
def pcgrad_manual_backward() -> Setup:
    """Gradient surgery: a backward for each task, whose gradients are projected and written back."""
    return Setup(PCGrad(), rows())
