"""Diffusion, flows, autoencoders, adversaries, energies."""

from __future__ import annotations

import copy
import itertools
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


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(torch.arange(half, device=t.device) * -(math.log(10000) / (half - 1)))
        emb = t[:, None] * freqs[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Denoiser(nn.Module):
    def __init__(self, dim=2, hidden=64):
        super().__init__()
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(16), nn.Linear(16, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.inp, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU()) for _ in range(2)]
        )
        nn.init.zeros_(self.out.weight)

    def forward(self, x, t):
        h, temb = self.inp(x), self.time_mlp(t)
        for block in self.blocks:
            h = h + block(h + temb)
        return self.out(h)


class DDPM(L.LightningModule):
    def __init__(self, T=1000, ema_decay=0.99):
        super().__init__()
        self.model = Denoiser()
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.ema_decay, self.T = ema_decay, T
        betas = torch.linspace(1e-4, 0.02, T, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1 - betas, 0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt().float())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt().float())
        snr = alphas_cumprod / (1 - alphas_cumprod)
        self.register_buffer("loss_weight", (snr.clamp(max=5) / snr).float())

    def training_step(self, batch, batch_idx):
        (x,) = batch
        t = torch.randint(0, self.T, (len(x),), device=self.device)
        noise = torch.randn_like(x)
        xt = self.sqrt_alphas_cumprod[t][:, None] * x + self.sqrt_one_minus_alphas_cumprod[t][:, None] * noise
        loss = F.mse_loss(self.model(xt, t), noise, reduction="none").mean(1)
        loss = (loss * self.loss_weight[t]).mean()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                e.lerp_(p, 1 - self.ema_decay)

    @torch.no_grad()
    def validation_step(self, batch, batch_idx):
        (x,) = batch
        t = torch.full((len(x),), 300, device=self.device)
        xt = self.sqrt_alphas_cumprod[t][:, None] * x
        self.log("val_eps", self.ema(xt, t).abs().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)


@project("generative", quick=True)
def ddpm_min_snr_ema() -> Setup:
    """A diffusion model (DDPM) of points, with min-SNR weights and an EMA of the net."""
    return Setup(DDPM(), points(), points(16), trainer={"gradient_clip_val": 1.0})


class FlowMatching(L.LightningModule):
    """Rectified flow with logit-normal times and a sample by Euler steps in the validation."""

    def __init__(self):
        super().__init__()
        self.net = Denoiser()

    def training_step(self, batch, batch_idx):
        (x1,) = batch
        x0 = torch.randn_like(x1)
        t = torch.sigmoid(torch.randn(len(x1), device=self.device))
        xt = torch.lerp(x0, x1, t[:, None])
        return F.mse_loss(self.net(xt, t * 1000), x1 - x0)

    def validation_step(self, batch, batch_idx):
        x = torch.randn(16, 2, device=self.device, generator=torch.Generator(self.device).manual_seed(0))
        for t in torch.linspace(0, 1, 11)[:-1]:
            x = x + self.net(x, t.to(x).expand(16) * 1000) / 10
        self.log("val_mean", x.mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@project("generative")
def flow_matching() -> Setup:
    """Rectified flow, SequentialLR, Euler samples in the validation."""
    return Setup(FlowMatching(), points(), points(8))


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


class EMAQuantizer(nn.Module):
    """Codebook by exponential averages of what was assigned; buffers that the forward writes."""

    def __init__(self, codes=16, dim=8, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps, self.codes = decay, eps, codes
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        dist = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.embed.t() + self.embed.pow(2).sum(1)
        index = dist.argmin(1)
        onehot = F.one_hot(index, self.codes).type(z.dtype)
        quantized = F.embedding(index, self.embed)
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(onehot.t() @ z.detach(), alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + self.eps) / (n + self.codes * self.eps) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(1))
        commitment = F.mse_loss(quantized.detach(), z)
        return z + (quantized - z).detach(), commitment, index


class VQVAE(Learner):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 8))
        self.vq = EMAQuantizer()
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 36))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z, commitment, index = self.vq(self.encoder(x))
        recon = F.mse_loss(self.decoder(z), x)
        self.log(
            "perplexity", torch.bincount(index, minlength=16).float().div(len(x)).clamp(min=1e-9).log().mean().exp()
        )
        return recon + 0.25 * commitment


@project("generative")
def vqvae_ema_codebook() -> Setup:
    """VQ-VAE: the forward updates the codebook, a running average in buffers."""
    return Setup(VQVAE(), images())


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", torch.tensor(mask))
        self.scale = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 2), nn.Tanh())
        self.shift = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 2))

    def forward(self, x):
        kept = x * self.mask
        s, t = self.scale(kept) * (1 - self.mask), self.shift(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(dim=1)


class RealNVP(L.LightningModule):
    """Couplings with 1x1 mixing by a learned matrix (Glow), its log determinant by `slogdet`."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList([Coupling([float(i % 2), float(1 - i % 2)]) for i in range(layers)])
        self.mix = nn.ParameterList([torch.linalg.qr(torch.randn(2, 2))[0] for _ in range(layers)])
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        log_det = x.new_zeros(len(x))
        for layer, w in zip(self.layers, self.mix, strict=True):
            x = x @ w
            log_det = log_det + torch.linalg.slogdet(w)[1]
            x, ld = layer(x)
            log_det = log_det + ld
        loss = -(self.prior.log_prob(x.float()) + log_det).mean()
        self.log("bits_per_dim", loss / (2 * math.log(2)))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-5)


@project("generative")
def normalizing_flow_realnvp() -> Setup:
    """RealNVP with 1x1 mixing and `slogdet`."""
    return Setup(RealNVP(), points(), trainer={"gradient_clip_val": 5.0})


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


class WGANGP(L.LightningModule):
    """Five steps of the critic for one of the generator, the penalty by `autograd.grad`."""

    n_critic, lambda_gp = 5, 10

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = generator(), critic()

    def gradients(self, scores, interpolates):
        return torch.autograd.grad(
            outputs=scores, inputs=interpolates, grad_outputs=torch.ones_like(scores),
            create_graph=True, retain_graph=True, only_inputs=True,
        )[0]  # fmt: skip

    def gradient_penalty(self, real, fake):
        alpha = torch.rand(real.size(0), 1, device=self.device)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        gradients = self.gradients(self.critic(interpolates), interpolates)
        return ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_c = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4, device=self.device))
        c_loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        gp = self.gradient_penalty(real, fake.detach())
        opt_c.zero_grad()
        self.manual_backward(c_loss + self.lambda_gp * gp)
        opt_c.step()
        self.log_dict({"critic": c_loss, "gp": gp})
        if (batch_idx + 1) % self.n_critic == 0:
            self.toggle_optimizer(opt_g)
            g_loss = -self.critic(self.generator(torch.randn(len(real), 4, device=self.device))).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("generator_loss", g_loss)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.0, 0.9)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.0, 0.9)),
        )


class WGANGPWithHelper(WGANGP):
    def gradients(self, scores, interpolates):
        plugin = self.trainer.precision_plugin
        take = getattr(plugin, "scaled_grad", torch.autograd.grad)
        return take(scores, interpolates, grad_outputs=torch.ones_like(scores), create_graph=True)[0]


@project("generative")
def wgan_gp_autograd_grad() -> Setup:
    """WGAN-GP, with the usual penalty by `torch.autograd.grad`."""
    return Setup(WGANGP(), points(80))


@project("generative")
def wgan_gp_scaled_grad() -> Setup:
    """WGAN-GP, with the penalty by `scaled_grad` if the plugin has it."""
    return Setup(WGANGPWithHelper(), points(80))


class ReplayBuffer:
    """The last fakes, as in CycleGAN; half of the time an old one is given back."""

    def __init__(self, max_size=16):
        self.data, self.max_size, self.random = [], max_size, torch.Generator().manual_seed(0)

    def push_and_pop(self, batch):
        out = []
        for element in batch.detach():
            if len(self.data) < self.max_size:
                self.data.append(element)
                out.append(element)
            elif torch.rand((), generator=self.random) > 0.5:
                i = int(torch.randint(0, self.max_size, (), generator=self.random))
                out.append(self.data[i].clone())
                self.data[i] = element
            else:
                out.append(element)
        return torch.stack(out)


class CycleGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        net = lambda: nn.Sequential(nn.Linear(2, 32), nn.InstanceNorm1d(32), nn.ReLU(), nn.Linear(32, 2))  # noqa: E731
        self.G_AB, self.G_BA, self.D_A, self.D_B = net(), net(), critic(), critic()
        self.features = nn.Sequential(nn.Linear(2, 16), nn.Tanh()).requires_grad_(False)
        self.buffer_A, self.buffer_B = ReplayBuffer(), ReplayBuffer()

    def set_requires_grad(self, nets, requires_grad):
        for net in nets:
            for p in net.parameters():
                p.requires_grad = requires_grad

    def training_step(self, batch, batch_idx):
        A, B = batch
        opt_g, opt_d = self.optimizers()
        self.set_requires_grad([self.D_A, self.D_B], False)
        fake_B, fake_A = self.G_AB(A), self.G_BA(B)
        cycle = F.l1_loss(self.G_BA(fake_B), A) + F.l1_loss(self.G_AB(fake_A), B)
        identity = F.l1_loss(self.G_AB(B), B) + F.l1_loss(self.G_BA(A), A)
        perceptual = F.mse_loss(self.features(fake_B), self.features(A)) + F.mse_loss(
            self.features(fake_A), self.features(B)
        )
        gan = (self.D_B(fake_B) - 1).pow(2).mean() + (self.D_A(fake_A) - 1).pow(2).mean()
        loss_g = gan + 10 * cycle + 5 * identity + perceptual
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        self.clip_gradients(opt_g, gradient_clip_val=10.0, gradient_clip_algorithm="norm")
        opt_g.step()

        self.set_requires_grad([self.D_A, self.D_B], True)
        opt_d.zero_grad()
        for D, real, fake, buffer in ((self.D_A, A, fake_A, self.buffer_A), (self.D_B, B, fake_B, self.buffer_B)):
            old = buffer.push_and_pop(fake)
            loss_d = 0.5 * ((D(real) - 1).pow(2).mean() + D(old).pow(2).mean())
            self.manual_backward(loss_d)
        opt_d.step()
        self.log_dict({"g": loss_g, "d": loss_d})

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers() or ():
            schedule.step()

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(
            itertools.chain(self.G_AB.parameters(), self.G_BA.parameters()), lr=2e-3, betas=(0.5, 0.999)
        )
        opt_d = torch.optim.Adam(
            itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr=2e-3, betas=(0.5, 0.999)
        )
        decay = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 2) for o in (opt_g, opt_d)]
        return [opt_g, opt_d], decay


@project("generative")
def cyclegan_frozen_features() -> Setup:
    """CycleGAN with a frozen net in the loss, pools of earlier images, and accumulated discriminator steps."""
    data = DataLoader(
        TensorDataset(two_moons(48, 0), two_moons(48, 1) @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])), batch_size=8
    )
    return Setup(CycleGAN(), data, trainer={"max_epochs": 2})


class EnergyBased(L.LightningModule):
    """Contrastive divergence: Langevin steps on the input inside of the training step, the net frozen meanwhile."""

    def __init__(self, steps=20, step_size=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        self.steps, self.step_size = steps, step_size
        self.examples = [torch.rand(1, 2) * 2 - 1 for _ in range(64)]

    def sample(self, x):
        training = self.training
        self.eval()
        for p in self.parameters():
            p.requires_grad = False
        x = x.clone().requires_grad_(True)
        with torch.enable_grad():
            for _ in range(self.steps):
                x.data.add_(torch.randn(x.shape, device=x.device) * 0.005).clamp_(-2, 2)
                out = -self.net(x)
                out.sum().backward()
                x.grad.data.clamp_(-0.03, 0.03)
                x.data.add_(-self.step_size * x.grad.data)
                x.grad.detach_()
                x.grad.zero_()
        for p in self.parameters():
            p.requires_grad = True
        self.train(training)
        return x.detach()

    def training_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.sample(torch.cat(self.examples[: len(real)]).to(self.device))
        self.examples = (list(fake.cpu().chunk(len(real))) + self.examples)[:64]
        real_out, fake_out = self.net(torch.cat([real, fake])).chunk(2)
        reg = 0.1 * (real_out**2 + fake_out**2).mean()
        cdiv = fake_out.mean() - real_out.mean()
        self.log_dict({"loss": reg + cdiv, "cdiv": cdiv})
        return reg + cdiv

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.0, 0.999))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)]


@project("generative")
def energy_based_langevin() -> Setup:
    """An energy-based model: each training step makes Langevin steps on the input, by `backward`."""
    return Setup(EnergyBased(), points(), trainer={"gradient_clip_val": 0.1})


class ScoreMatching(Learner):
    """Sliced score matching: a Hessian-vector product inside of the loss."""

    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x = x.detach().requires_grad_(True)
        v = torch.randn(x.shape, device=x.device)
        s = self.score(x)
        (grad,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
        loss = ((v * grad).sum(-1) + 0.5 * (s * v).sum(-1) ** 2).mean()
        self.log("loss", loss)
        return loss


@project("generative")
def sliced_score_matching() -> Setup:
    """Sliced score matching: the gradient of a product inside of the loss."""
    return Setup(ScoreMatching(), points())
