"""Functional calls, compiled and checkpointed submodules, parametrizations, odd dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


class HyperNetwork(Classifier):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(3, 8) * 0.1)
        self.shapes = [(16, 8), (16, 16), (4, 16)]
        self.hyper = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16 * 16 + 16))

    def forward(self, x):
        for i, (o, k) in enumerate(self.shapes):
            w = self.hyper(self.embedding[i])
            x = F.linear(x, w[: o * k].view(o, k) / math.sqrt(k), w[-o:])
            x = F.relu(x) if i < 2 else x
        return x


@project("functional")
def hypernetwork() -> Setup:
    """Weights made by another net, used by `F.linear`."""
    return Setup(HyperNetwork(), rows(), rows(seed=1))


class MoE(nn.Module):
    """Top-2 routing with `index_add_`, as in Mixtral's code, and a load balancing loss."""

    def __init__(self, dim=16, experts=4, k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(experts)]
        )
        self.k = k

    def forward(self, x):
        logits = self.gate(x)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        top, chosen = torch.topk(weights, self.k, dim=-1)
        top = (top / top.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            slot, token = torch.where(mask[i])
            out.index_add_(0, token, (expert(x[token]) * top[token, slot, None]).to(x.dtype))
        share = mask.float().mean((1, 2)) * self.k
        self.aux_loss = len(self.experts) * (share * weights.mean(0)).sum()
        return out


class LitMoE(Classifier):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.head = nn.Linear(8, 16), MoE(), nn.Linear(16, 4)

    def forward(self, x):
        h = self.inp(x)
        return self.head(h + self.moe(h))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * self.moe.aux_loss


@project("functional", quick=True)
def mixture_of_experts_top2() -> Setup:
    """Top-2 routing with `index_add_`, an auxiliary loss kept on the module."""
    return Setup(LitMoE(), rows(16, n=96))


class MAML(Learner):
    """Inner steps by `autograd.grad(create_graph=True)` and `functional_call`."""

    def __init__(self, inner_lr=0.05, inner_steps=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.inner_lr, self.inner_steps = inner_lr, inner_steps

    def training_step(self, batch, batch_idx):
        losses = []
        for xs, ys, xq, yq in zip(*batch, strict=True):
            params = dict(self.net.named_parameters())
            for _ in range(self.inner_steps):
                loss = F.mse_loss(functional_call(self.net, params, (xs,)), ys)
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {n: p - self.inner_lr * g for (n, p), g in zip(params.items(), grads, strict=True)}
            losses.append(F.mse_loss(functional_call(self.net, params, (xq,)), yq))
        loss = torch.stack(losses).mean()
        self.log("meta_loss", loss)
        return loss


def sinusoids(tasks=24, shots=5):
    g = torch.Generator().manual_seed(0)
    amplitude = 0.5 + 2 * torch.rand(tasks, 1, 1, generator=g)
    phase = math.pi * torch.rand(tasks, 1, 1, generator=g)
    x = 5 * torch.rand(tasks, 2 * shots, 1, generator=g) - 2.5
    y = amplitude * torch.sin(x + phase)
    return TensorDataset(x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:])


@project("functional")
def maml_second_order() -> Setup:
    """Second-order MAML: `functional_call` and `autograd.grad(create_graph=True)`."""
    return Setup(MAML(), DataLoader(sinusoids(), batch_size=4))


class ANIL(MAML):
    """The same over all tasks at once: `vmap` of a function that uses `torch.func.grad`."""

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
    return Setup(ANIL(), DataLoader(sinusoids(), batch_size=4))


class PerSampleClipping(Classifier):
    """DP-SGD by hand: gradients per sample by `vmap(grad)`, clipped, summed, put into `.grad`."""

    def __init__(self):
        super().__init__(mlp())
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        params = {n: p.detach() for n, p in self.net.named_parameters()}

        def loss_fn(params, x, y):
            return F.cross_entropy(functional_call(self.net, params, (x[None],)), y[None])

        grads = vmap(grad(loss_fn), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for n, p in self.net.named_parameters():
            p.grad = (torch.einsum("n,n...->...", factor, grads[n]) / len(x)).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        self.log("norm", norms.mean())


@project("functional")
def per_sample_gradients_dp_sgd() -> Setup:
    """Gradients per sample by `vmap(grad(...))`, written into `.grad` by hand."""
    return Setup(PerSampleClipping(), rows())


class Ensemble(Classifier):
    def __init__(self, size=5):
        super().__init__()
        models = [mlp() for _ in range(size)]
        params, _ = stack_module_state(models)
        self.stacked = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(p.detach()) for n, p in params.items()})
        self.base = [mlp().to("meta")]

    def forward(self, x):
        params = {n.replace("/", "."): p for n, p in self.stacked.items()}
        return vmap(lambda p: functional_call(self.base[0], p, (x,)))(params)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)))

    def validation_step(self, batch, batch_idx):
        x, _y = batch
        self.log("val_disagreement", self(x).softmax(-1).std(0).mean())


@project("functional")
def ensemble_vmap_stack_module_state() -> Setup:
    """Five nets in one call: `stack_module_state` and `vmap`."""
    return Setup(Ensemble(), rows(), rows(seed=1))


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


@project("functional")
def compiled_submodule_eager() -> Setup:
    """A submodule under `torch.compile` with the eager backend."""
    torch._dynamo.reset()
    return Setup(Compiled("eager"), rows(), rows(seed=1))


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


@project("functional")
def checkpointing_reentrant() -> Setup:
    """Gradient checkpointing, reentrant, with a block that is used twice."""
    return Setup(Checkpointed(True), rows(), rows(seed=1))


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


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(Classifier):
    def __init__(self):
        super().__init__()
        square = nn.Linear(16, 16)
        parametrize.register_parametrization(square, "weight", Symmetric())
        self.net = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(),
            parametrizations.weight_norm(nn.Linear(16, 16)), nn.LeakyReLU(),
            square, nn.LeakyReLU(), parametrizations.orthogonal(nn.Linear(16, 4)),
        )  # fmt: skip


@project("functional")
def parametrizations_spectral_weight_orthogonal() -> Setup:
    """Spectral norm, weight norm, a symmetric and an orthogonal weight."""
    return Setup(Parametrized(), rows(), rows(seed=1))


class OldNorms(Classifier):
    """The old functions, with hooks instead of parametrizations, in a recurrent use."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.rec = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.inp(x)
        for _ in range(8):
            h = torch.tanh(h + self.rec(h))
        return self.head(h)


@project("functional")
def old_spectral_norm_reused() -> Setup:
    """The old `spectral_norm` on a layer that is used eight times."""
    return Setup(OldNorms(), rows(), rows(seed=1))


class TiedAutoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.bias = nn.Parameter(torch.zeros(8))
        self.tokens, self.head = nn.Embedding(4, 16), nn.Linear(16, 4, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = torch.relu(self.encoder(x) + self.tokens(y))
        recon = F.linear(h, self.encoder.weight.t(), self.bias)
        return F.mse_loss(recon, x) + F.cross_entropy(self.head(h), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, nesterov=True, momentum=0.9)


@project("functional")
def tied_weights() -> Setup:
    """A decoder that shares its weight with the encoder, and a head that shares it with the embedding."""
    return Setup(TiedAutoencoder(), rows())


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


@project("functional")
def physics_informed_float64() -> Setup:
    """A physics-informed net with second derivatives, in float64."""
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Setup(PINN().double(), DataLoader(TensorDataset(x), batch_size=16))


@dataclass
class Sample:
    features: Tensor
    weights: Tensor
    labels: Tensor
    names: list[str]


class Samples(Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return {"x": x.numpy(), "meta": {"weight": 1.0 + i % 3, "name": f"sample {i}"}, "y": int(x[:4].argmax())}


class DictBatches(Classifier):
    """Nested dicts from numpy: float64 arrive, strings too; as a dataclass by the collate function."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = Sample(batch["x"], batch["meta"]["weight"], batch["y"], batch["meta"]["name"])
        losses = F.cross_entropy(self(batch.features.float()), batch.labels, reduction="none")
        return {"loss": (losses * batch.weights.float()).mean(), "names": batch.names}


@project("batches", quick=True)
def nested_dicts_with_float64() -> Setup:
    """Nested dicts with float64 numpy arrays and strings; the last batch is smaller."""
    return Setup(DictBatches(mlp()), DataLoader(Samples(), batch_size=8))


def as_dataclass(samples):
    x = torch.stack([torch.from_numpy(s["x"]).float() for s in samples])
    weights, y = torch.tensor([s["meta"]["weight"] for s in samples]), torch.tensor([s["y"] for s in samples])
    return Sample(x, weights, y, [s["meta"]["name"] for s in samples])


@project("batches")
def dataclass_batches() -> Setup:
    """Batches that are dataclasses."""
    return Setup(DictBatches(mlp()), DataLoader(Samples(), batch_size=8, collate_fn=as_dataclass))


class SetEncoder(Classifier):
    """Sets of any size, also empty ones: mean by lengths."""

    def training_step(self, batch, batch_idx):
        items, lengths, y = batch
        h = self.net[:4](items)
        owner = torch.repeat_interleave(torch.arange(len(y), device=h.device), lengths)
        pooled = torch.zeros(len(y), h.size(1), dtype=h.dtype, device=h.device).index_add(0, owner, h)
        pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
        return F.cross_entropy(self.net[4](pooled), y)


def collate_sets(samples):
    items, y = zip(*samples, strict=True)
    return torch.cat(items), torch.tensor([len(i) for i in items]), torch.tensor(y)


@project("batches")
def sets_with_empty_ones() -> Setup:
    """Samples with zero to four rows; one whole batch has no row."""
    sizes = [i % 5 for i in range(16)] + [0, 0, 0, 0] + [1] * 3
    samples = [(torch.randn(k, 8, generator=torch.Generator().manual_seed(i)), i % 4) for i, k in enumerate(sizes)]
    return Setup(SetEncoder(mlp()), DataLoader(samples, batch_size=4, collate_fn=collate_sets))


@project("batches")
def batch_of_one_with_batch_norm() -> Setup:
    """BatchNorm over a sequence, batches of one sample, an incomplete last window and accumulation."""
    norm = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    x = torch.randn(9, 6, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, torch.arange(9) % 4), batch_size=1)
    return Setup(Classifier(norm), data, trainer={"accumulate_grad_batches": 2})


class SometimesNone(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx in (0, 3, 7):
            return None
        return super().training_step(batch, batch_idx)


@project("batches")
def training_step_returns_none() -> Setup:
    """`training_step` returns `None` for three batches, one of which ends an accumulation window."""
    return Setup(SometimesNone(mlp()), rows(6), trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})


@project("batches")
def accumulate_clip_by_value() -> Setup:
    """Accumulation over three of eight batches, clipping by value."""
    kwargs = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    return Setup(Classifier(mlp()), rows(n=62), rows(seed=1), trainer=kwargs)


class SpeechCTC(L.LightningModule):
    def __init__(self, blank=0, symbols=6):
        super().__init__()
        self.rnn = nn.GRU(8, 16, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, symbols)
        self.criterion = nn.CTCLoss(blank=blank, zero_infinity=True)

    def training_step(self, batch, batch_idx):
        x, x_lengths, y, y_lengths = batch
        log_probs = F.log_softmax(self.fc(self.rnn(x)[0]), dim=-1).transpose(0, 1)
        loss = self.criterion(log_probs, y, x_lengths, y_lengths)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, steps_per_epoch=4, epochs=1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@project("batches")
def speech_ctc() -> Setup:
    """CTC loss on log probabilities; some targets are too long."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 20, 8, generator=g), torch.randint(1, 6, (32, 6), generator=g)
    x_lengths = torch.randint(5, 21, (32,), generator=g)
    return Setup(
        SpeechCTC(), DataLoader(TensorDataset(x, x_lengths, y, torch.randint(1, 7, (32,), generator=g)), batch_size=8)
    )


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


class PCGradFromAutograd(PCGrad):
    """The other way people write it: `autograd.grad` per task, of the unscaled loss."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        params = list(self.parameters())
        losses = self.losses(batch)
        flat = []
        for loss in losses:
            grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            flat.append(torch.cat([g.flatten() for g in grads]))
        dot = flat[0] @ flat[1]
        if dot < 0:
            a, b = flat
            flat = [a - dot / (b @ b) * b, b - dot / (a @ a) * a]
        for p, g in zip(params, sum(flat).split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        self.log_dict({"task_0": losses[0], "task_1": losses[1]})


@project("multi-task")
def pcgrad_manual_backward() -> Setup:
    """Gradient surgery: a backward for each task, whose gradients are projected and written back."""
    return Setup(PCGrad(), rows())


@project("multi-task")
def pcgrad_autograd_grad() -> Setup:
    """Gradient surgery with `torch.autograd.grad` of the loss, without a loss scale."""
    return Setup(PCGradFromAutograd(), rows())


class UncertaintyWeighting(PCGrad):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        losses = torch.stack(self.losses(batch))
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


@project("multi-task")
def uncertainty_weighting() -> Setup:
    """Two tasks with learned weights."""
    return Setup(UncertaintyWeighting(), rows(), trainer={"gradient_clip_val": 1.0})


class Distillation(Classifier):
    """A frozen teacher, kept out of the state dict, hidden layers matched through forward hooks."""

    def __init__(self):
        super().__init__(mlp())
        self._teacher = [mlp(h=64).eval().requires_grad_(False)]
        self.adapter, self.seen = nn.Linear(32, 64), {}
        self.net[3].register_forward_hook(lambda m, i, o: self.seen.__setitem__("student", o))
        self._teacher[0][3].register_forward_hook(lambda m, i, o: self.seen.__setitem__("teacher", o))

    def training_step(self, batch, batch_idx, T=4.0):
        x, y = batch
        student = self(x)
        with torch.no_grad():
            teacher = self._teacher[0].to(self.device)(x)
        soft = F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
        hint = F.mse_loss(self.adapter(self.seen["student"]), self.seen["teacher"])
        return 0.5 * F.cross_entropy(student, y) + 0.5 * soft + 0.1 * hint


@project("multi-task", quick=True)
def knowledge_distillation_hooks() -> Setup:
    """A frozen teacher that is not a submodule; forward hooks read its hidden layers."""
    return Setup(Distillation(), rows())


class LitLBFGS(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")


@project("multi-task", look="before")
def lbfgs_strong_wolfe() -> Setup:
    """LBFGS with line search, with all data in one batch."""
    return Setup(LitLBFGS(), rows(48), trainer={"max_epochs": 4})
