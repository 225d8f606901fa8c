"""Planted faults: what goes wrong in real projects, each with who is to blame and what cures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision

WIDTH = 8


class Net(L.LightningModule):
    """A perceptron with a loss of somebody's own."""

    lr = 1e-3

    def __init__(self, loss: Callable[[Any, Any], Tensor] | None = None, **parts: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for name, part in parts.items():
            setattr(self, name, part)
        self.head = nn.Linear(WIDTH, 1)
        self._loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self._loss is not None
        return self._loss(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@dataclass
class Fault:
    """One fault.

    Attributes:
        make: The module, ill or cured.
        cause: As reported.
        operation: Name of the operation to blame; empty: none is named.
        line: Part of the line that is named.
        module: That is named.
        in_fp32: Whether fp32 is finite.
        precision: Of the run.
        data: Batches.
        says: What the advice must say.
        never: What it must not.
        remedy: Of what was tried, a kind that must have worked.
        scaler: Of the plugin.
        is_taken: Whether the steps are taken.
        warns: Matches a warning that is said before the step.

    """

    make: Callable[[bool], Any]
    cause: str
    operation: str = ""
    line: str = ""
    module: str | None = None
    in_fp32: str = "finite"
    precision: str = "fp16"
    data: Callable[[bool], Any] | None = None
    says: str = ""
    never: tuple[str, ...] = ()
    remedy: str = ""
    scaler: Any = None
    is_taken: bool = False
    warns: str = ""
    cured: dict[str, Any] = field(default_factory=dict)

    def plugin(self, cured: bool = False) -> AmpPrecision:
        arguments = {"precision": self.precision, "scaler": self.scaler, **(self.cured if cured else {})}
        return AmpPrecision(**arguments)

    def loader(self, cured: bool = False) -> Any:
        return plain_data() if self.data is None else self.data(cured)


def plain_data(batches: int = 4, rows: int = 4) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randn(batches * rows, WIDTH, generator=generator), batch_size=rows)


def with_row(row: int, value: float) -> Callable[[bool], Any]:
    def make(cured: bool) -> Any:
        data = torch.cat(list(plain_data()))
        if not cured:
            data[row, 3] = value
        return DataLoader(data, batch_size=4)

    return make


# -- the range of fp16 -------------------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """InfoNCE by hand."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def forward(self, z: Tensor) -> Tensor:
        z = z * 3.6 / z.norm(dim=-1, keepdim=True)
        sim = (z @ z.T).half() if z.dtype != torch.bfloat16 else z @ z.T
        if self.cured:
            return (torch.logsumexp(sim, -1) - sim.diagonal()).mean()
        log_z = torch.log(torch.exp(sim).sum(-1))
        return (log_z - sim.diagonal()).mean()


class Attention(nn.Module):
    """Scores between modules, without the usual divisor."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.query, self.key, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cured = cured

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x) * 900, self.key(x) * 900
        scores = (q / 1e4) @ k.T if self.cured else q @ k.T
        return self.proj(torch.softmax(scores.float() / 1e4, -1) @ x)


class Amplifier(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().abs().max() * self.by


class Energy(nn.Module):
    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def forward(self, x: Tensor) -> Tensor:
        x = 200 * x / x.detach().abs().max()
        return (x.float() if self.cured else x).pow(2).sum(-1, keepdim=True).sqrt() / 100


def mse(module: Any, batch: Tensor) -> Tensor:
    return F.mse_loss(module.head(module.encoder(batch)).float(), batch.sum(1, keepdim=True))


def through(name: str) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        out = getattr(module, name)(module.encoder(batch))
        return F.mse_loss(module.head(out).float(), batch.sum(1, keepdim=True))

    return loss


def scalar(name: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, batch: getattr(module, name)(module.encoder(batch)).float().mean()


# -- wrong in every precision ------------------------------------------------------------------------------------------


def normalised(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        out = module.encoder(batch).float() * (batch.abs().sum(1, keepdim=True) > 0)
        length = out.square().sum(-1, keepdim=True)
        unit = out / (length + 1e-6) if cured else out / length
        return (module.head(unit).float() ** 2).mean()

    return loss


def log_of_zero(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        p = torch.relu(module.encoder(batch)).float().sum(-1) * 0 + (batch[:, 0] > 0).float()
        p = p + module.head(module.encoder(batch)).float().squeeze() * 0
        return -torch.log(p + 1e-6 if cured else p).mean()

    return loss


def distance(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """The derivative of a root at 0: the diagonal of a matrix of distances."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch).float()
        squared = (z[:, None] - z[None]).square().sum(-1)
        return torch.sqrt(squared + 1e-6 if cured else squared).mean()

    return loss


def angle(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        z = F.normalize(module.encoder(batch).float(), dim=-1)
        cosine = (z * z.detach()).sum(-1) * 0 + 1 + z.sum(-1) * 0
        return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6) if cured else cosine).mean()

    return loss


def masked_row(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch)
        scores = (z @ z.T).float()
        keep = torch.ones_like(scores, dtype=torch.bool)
        keep[2] = False
        if cured:
            keep[2, 2] = True
        scores = scores.masked_fill(~keep, float("-inf"))
        weights = torch.softmax(scores, -1)
        return (weights @ z.float()).float().square().mean()

    return loss


def no_labels(cured: bool) -> Callable[[Any, Any], Tensor]:
    def loss(module: Any, batch: Any) -> Tensor:
        x, y = batch
        known = y != -100
        each = (module.head(module.encoder(x)).float().squeeze(-1) - y).square() * known
        return each.sum() / (known.sum().clamp(min=1) if cured else known.sum())

    return loss


def labelled(rows: int = 16, empty: int = 1) -> Callable[[bool], Any]:
    def make(cured: bool) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % WIDTH
        y[4 * empty : 4 * empty + 4] = -100
        return DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)

    return make


def advantage(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """Reinforcement learning: an episode of one step has no spread."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        value = module.head(module.encoder(batch[:1])).float().squeeze(-1)
        spread = value.std(correction=0) + 1e-6 if cured else value.std()
        return ((value - value.mean()) / spread).mean() + value.square().mean()

    return loss


class Diverges(Net):
    lr = 1e4

    def __init__(self, cured: bool) -> None:
        super().__init__(mse)
        if cured:
            self.lr = 1e-3


def outlier(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        powers = F.layer_norm(batch.square() if not cured else batch.clamp(-5, 5).square(), (WIDTH,))
        return module.head(module.encoder(powers)).float().square().mean()

    return loss


def huge_ratio(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """PPO: the exponential of a difference of logarithms."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        new = module.head(module.encoder(batch)).float().squeeze(-1)
        difference = new - (new.detach() - 120)
        ratio = torch.exp(difference.clamp(max=20) if cured else difference)
        return (ratio * batch[:, 0]).mean()

    return loss


def kl(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """A VAE whose log-variance is not bounded."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch)
        log_var = (z + 13).half() if not cured else (z + 5).float()
        mean = z.float()
        return -0.5 * (1 + log_var - mean**2 - log_var.exp()).float().mean()

    return loss


def small_epsilon(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """1e-8 is 0 in float16."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch)
        z = z.half() if z.dtype != torch.bfloat16 else z
        z = z * (torch.arange(len(z)) > 0)[:, None].to(z.dtype)
        norm = z.abs().sum(-1, keepdim=True) + (1e-3 if cured else 1e-8)
        return module.head(z / norm).float().square().mean()

    return loss


def sum_in_half(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch)
        error = (z - z.detach() + 400) * 1.0
        error = error.half() if not cured else error.float()
        return error.repeat(64, 1).cumsum(0)[-1].float().square().mean() * 1e-12

    return loss


def cast(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch)
        target = (batch.sum(1, keepdim=True) + 1e5) * 1.0
        return ((z.float() - (target if cured else target.half()).float()) / 1e5).square().mean()

    return loss


class Scaled(nn.Module):
    """A gradient inside overflows although those of all parameters fit."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.gain = 1.0 if cured else 2e4

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.gain) * self.gain


class NanWeight(Net):
    def __init__(self, cured: bool) -> None:
        super().__init__(mse)
        if not cured:
            self.encoder[2].weight.data[1, 2] = float("nan")


class Table(nn.Module):
    """Positions, one of them never initialised."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH))
        if not cured:
            self.table[2] = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class SummedLoss(Net):
    def __init__(self, cured: bool) -> None:
        super().__init__(self._sum)
        self.cured = cured

    def _sum(self, module: Any, batch: Tensor) -> Tensor:
        loss = mse(self, batch) * 1e8
        return loss / 2**20 if self.cured else loss


class Gan(Net):
    """Two optimizers; the logarithm of a probability that is 0."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None, critic=nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid()))
        self.automatic_optimization = False
        self.cured = cured

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            fake = self.encoder(batch)
            p = self.critic(fake).float() * (batch[:, :1] > 0)
            loss = -sign * (torch.log(p + 1e-6) if self.cured else torch.log(p)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (self.encoder, self.critic)]


class Recurrent(Net):
    """A hidden state that grows."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None, cell=nn.Linear(WIDTH, WIDTH))
        self.cured = cured
        with torch.no_grad():
            self.cell.weight.copy_(torch.eye(WIDTH) * 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        state = self.encoder(batch)
        for _ in range(12):
            state = torch.tanh(self.cell(state)) if self.cured else self.cell(state)
        return self.head(state / 1e7).float().square().mean()


class PlainNan(Net):
    """The labels have holes, which is fine: they are masked. Something else is wrong."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None)
        self.cured = cured

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.encoder(x)
        out = out.half() if out.dtype != torch.bfloat16 and not self.cured else out.float()
        known = torch.isfinite(y)
        energy = (out * 1000).square().float()
        return ((energy - y)[known] / 1e5).mean()


def holes(cured: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)
    y[::3] = float("nan")
    return DataLoader(torch.utils.data.TensorDataset(x * 3, y), batch_size=4)


def divided(by: Callable[[Any, Tensor], Tensor], cured: bool, eps: float = 1e-6) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        out = module.head(module.encoder(batch)).float()
        divisor = by(module, batch).float()
        return (out / (divisor + eps if cured else divisor)).mean()

    return loss


# -- more of both ------------------------------------------------------------------------------------------------------


class RmsNorm(nn.Module):
    """By hand, in whatever comes in."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured, self.inner = cured, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x = x / x.detach().abs().max() * 400
        wide = x.float() if self.cured else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Distances(nn.Module):
    """A matrix of squared distances by the binomial formula."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.detach().abs().max() * (1 if self.cured else 300)
        squares = (x * x).sum(-1)
        return (squares[:, None] + squares[None] - 2 * x @ x.T).float().mean(-1, keepdim=True) / 1e5


class Experts(nn.Module):
    """A gate by hand: an expert that gets no token is a mean of nothing."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured
        self.gate = nn.Linear(WIDTH, 4)
        with torch.no_grad():
            self.gate.weight.zero_()
            self.gate.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).float().argmax(-1)
        load = torch.stack([x[choice == i].float().sum() / self.count(choice == i) for i in range(4)])
        return load.mean().square() + x.float().square().mean()

    def count(self, chosen: Tensor) -> Tensor:
        return chosen.sum().clamp(min=1) if self.cured else chosen.sum()


class SoftPlus(nn.Module):
    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.detach().abs().max() * 30
        return F.softplus(x) if self.cured else torch.log(1 + torch.exp(x.half() if x.dtype == torch.float16 else x))


class Masks(nn.Module):
    """A causal mask and a padding mask are added; a row has neither."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.full((len(x), len(x)), float("-inf")).triu(1)
        padding = torch.zeros(len(x))
        padding[0] = torch.finfo(torch.float16).min if self.cured else float("-inf")
        scores = (x @ x.T).float() + causal + padding
        return torch.softmax(scores, dim=-1) @ x.float()


class Calibrated(nn.Module):
    """Logits with a learned temperature that is far too small."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0 if cured else 15.0))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x.half() * self.log_scale.exp().to(torch.float16) if x.dtype == torch.float16 else x * self.log_scale.exp()
        )


def penalty(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """A gradient penalty whose norm is 0."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        out = module.head(module.encoder(batch)).float()
        flat = out * 0
        length = (flat.square().sum(-1) + 1e-12).sqrt() if cured else flat.square().sum(-1).sqrt()
        return ((length - 1) ** 2).mean() + out.square().mean()

    return loss


def cross_entropy_by_hand(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    def loss(module: Any, batch: Tensor) -> Tensor:
        logits = module.encoder(batch).float() * 400
        if cured:
            return -torch.log_softmax(logits, -1)[:, 0].mean()
        return -torch.log(torch.softmax(logits, -1))[:, 0].mean()

    return loss


def power(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """A focal loss with an exponent below 1, at 0."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        p = module.encoder(batch).float()
        p = p * (p > 0)
        return torch.pow(p + 1e-6 if cured else p, 0.5).mean()

    return loss


def policy(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """Advantages that are all equal."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        value = module.head(module.encoder(batch)).float().squeeze(-1)
        advantage = value.detach() * 0 + 1
        scaled = (advantage - advantage.mean()) / (advantage.std() + (1e-8 if cured else 0))
        return (scaled * value).mean()

    return loss


def entropy(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """p log p where a probability is 0."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        p = torch.softmax(module.encoder(batch).float() * 400, -1)
        return (p * torch.log(p + 1e-6 if cured else p)).sum(-1).mean()

    return loss


def root_behind_where(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """`where` hides the value and not the derivative."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        x = module.encoder(batch).float()
        x = x * (x > 0)
        safe = torch.where(x > 0, x, torch.ones_like(x)) if cured else x
        return torch.where(x > 0, torch.sqrt(safe), torch.zeros_like(x)).mean()

    return loss


def reciprocal(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """Weights of classes, one of which is not there."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        counts = torch.bincount((batch[:, 0] > 10).long(), minlength=2).float()
        weights = 1 / (counts.clamp(min=1) if cured else counts)
        return (module.head(module.encoder(batch)).float() * weights).mean()

    return loss


def negative_root(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """A variance as the difference of two means."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        z = module.encoder(batch).float()
        variance = (z * 0 - 1e-4) + z.square().mean() * 0
        return torch.sqrt(variance.clamp(min=1e-6) if cured else variance).mean() + z.mean()

    return loss


class Student(Net):
    """Distillation: the mask of the padding hides all of one sample."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))
        self.cured = cured

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.encoder(batch).view(2, -1, WIDTH)
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[1] = True
        if self.cured:
            padded[1, 0] = False
        out, _ = self.attention(x, x, x, key_padding_mask=padded)
        return self.head(out).float().square().mean()


class Late(Net):
    """Healthy but for one batch in the second epoch."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None)
        self.cured = cured

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = mse(self, batch) * 30
        if self.current_epoch == 1 and batch_idx == 2 and not self.cured:
            loss = loss + torch.log(loss.detach() * 0) * loss
        return loss


class Inner(nn.Module):
    """The gradient inside is 300 times that of any parameter."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.gain = 1.0 if cured else 300.0
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / self.gain) * self.gain


class Scheduled(Net):
    """A schedule that divides by a number that becomes 0."""

    def __init__(self, cured: bool) -> None:
        super().__init__(mse)
        self.cured = cured

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        decay = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0])
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: float(decay[min(step, 4)] / (decay[min(step, 3 if self.cured else 4)]))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def ignored(cured: bool) -> Callable[[Any, Any], Tensor]:
    """A batch without a label: a NaN for a loss, and gradients of 0."""

    def loss(module: Any, batch: Any) -> Tensor:
        x, y = batch
        logits = module.encoder(x).float()
        if cured:
            return F.cross_entropy(logits, y, reduction="sum") / max(1, int((y != -100).sum()))
        return F.cross_entropy(logits, y)

    return loss


def errors_summed(cured: bool) -> Callable[[Any, Tensor], Tensor]:
    """The errors fit into float16, their sum does not."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        errors = (module.encoder(batch).half() - 60.0).square()
        return (errors.float() if cured else errors).sum().float()

    return loss


class Generator(Net):
    """`log(1 - D(x))` by hand, of a sigmoid that is 1 in half precision and not in float32."""

    def __init__(self, cured: bool) -> None:
        super().__init__(None, critic=nn.Linear(WIDTH, 1))
        self.cured = cured
        nn.init.constant_(self.critic.bias, 9.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        score = self.critic(self.encoder(batch))
        fooled = torch.sigmoid(score.float() if self.cured else score)
        return -torch.log(1 - fooled).float().mean()


MORE: dict[str, Fault] = {
    "a learning rate that becomes NaN": Fault(
        Scheduled,
        "weights",
        in_fp32="not finite",
        precision="fp32",
        warns=r"The optimizer \(SGD\): `lr` is NaN, as `LambdaLR` has set it, .* faults.py:.*Step 4 is about to use it",
        says="`lr` was NaN in step 4",
        never=("'bf16'",),
    ),
    "labels that are all ignored": Fault(
        lambda cured: Net(ignored(cured)),
        "loss",
        "cross_entropy",
        "F.cross_entropy(logits, y)",
        in_fp32="not finite",
        data=labelled(),
        says="divide by `max(1, count)`",
        never=("'bf16'",),
        is_taken=True,
    ),
    "labels that are all ignored in bf16": Fault(
        lambda cured: Net(ignored(cured)),
        "loss",
        "cross_entropy",
        "F.cross_entropy(logits, y)",
        in_fp32="not finite",
        precision="bf16",
        data=labelled(),
        says="although its loss is not finite",
        is_taken=True,
    ),
    "a loss that is summed in half": Fault(
        lambda cured: Net(errors_summed(cured)),
        "loss",
        "sum",
        "(errors.float() if cured else errors).sum()",
        says="it adds up 32 finite values, and the sum leaves the range of float16; in fp32 it is finite, up to",
        remedy="operation in fp32",
    ),
    "a sigmoid that is 1 in fp16": Fault(
        Generator,
        "loss",
        "log",
        "torch.log(1 - fooled)",
        says='"fooled = torch.sigmoid(score.float() if self.cured else score)" is rounded to half precision, so that',
        never=("epsilon", "'bf16'"),
        remedy="source in fp32",
    ),
    "a sigmoid that is 1 in bf16": Fault(
        Generator,
        "loss",
        "log",
        "torch.log(1 - fooled)",
        precision="bf16",
        says="`F.logsigmoid(-x)` in the place of `log(1 - sigmoid(x))` (tried: works)",
        never=("epsilon",),
        remedy="source in fp32",
    ),
    "an RMSNorm in half": Fault(
        lambda cured: Net(through("norm"), norm=RmsNorm(cured)),
        "forward",
        "pow",
        "wide.pow(2)",
        "norm",
        remedy="bf16",
    ),
    "squared distances in half": Fault(
        lambda cured: Net(scalar("distances"), distances=Distances(cured)),
        "forward",
        "mul",
        "(x * x).sum(-1)",
        "distances",
        remedy="fp32_modules",
    ),
    "an expert without a token": Fault(
        lambda cured: Net(scalar("experts"), experts=Experts(cured)),
        "forward",
        "div",
        "self.count(",
        "experts",
        "not finite",
        says="an epsilon in the divisor",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a softplus by hand": Fault(
        lambda cured: Net(through("soft"), soft=SoftPlus(cured)),
        "forward",
        "exp",
        "torch.exp(x",
        "soft",
        says="keep the argument of `exp` small",
        remedy="bf16",
    ),
    "two masks that hide a row": Fault(
        lambda cured: Net(through("masks"), masks=Masks(cured)),
        "forward",
        "softmax",
        "torch.softmax(scores",
        "masks",
        "not finite",
        says="unmasked",
        never=("'bf16'",),
        remedy="finite mask",
    ),
    "a learned temperature": Fault(
        lambda cured: Net(through("calibrated"), calibrated=Calibrated(cured)),
        "forward",
        "to",
        ".to(torch.float16)",
        "calibrated",
        says="float32",
    ),
    "a penalty at 0": Fault(
        lambda cured: Net(penalty(cured)),
        "backward",
        "sqrt",
        ".sqrt()",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'", "nothing, if"),
        remedy="epsilon",
    ),
    "a penalty at 0 in fp32": Fault(
        lambda cured: Net(penalty(cured)),
        "backward",
        "sqrt",
        ".sqrt()",
        None,
        "not finite",
        "fp32",
        says="an epsilon",
        never=("'bf16'", "nothing, if"),
        remedy="epsilon",
    ),
    "a cross-entropy by hand": Fault(
        lambda cured: Net(cross_entropy_by_hand(cured)),
        "loss",
        "log",
        "torch.log(torch.softmax",
        None,
        "not finite",
        says="an epsilon in the argument of `log`",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "an exponent below 1": Fault(
        lambda cured: Net(power(cured)),
        "backward",
        "pow",
        "torch.pow(",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "advantages that are all equal": Fault(
        lambda cured: Net(policy(cured)),
        "loss",
        "div",
        "advantage.std()",
        None,
        "not finite",
        "bf16",
        says="an epsilon in the divisor",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "an entropy": Fault(
        lambda cured: Net(entropy(cured)),
        "loss",
        "log",
        "torch.log(",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a root behind where": Fault(
        lambda cured: Net(root_behind_where(cured)),
        "backward",
        "sqrt",
        "torch.sqrt(safe)",
        None,
        "not finite",
        says="`torch.where` behind it does not help",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a class that is not there": Fault(
        lambda cured: Net(reciprocal(cured)),
        "loss",
        "div",
        "1 / (counts",
        None,
        "not finite",
        says="an epsilon in the divisor",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a root of a negative number": Fault(
        lambda cured: Net(negative_root(cured)),
        "loss",
        "sqrt",
        "torch.sqrt(",
        None,
        "not finite",
        says="below 0",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a sample that is all padding": Fault(
        Student,
        "forward",
        "multi_head_attention_forward",
        "self.attention(x, x, x",
        "attention",
        "not finite",
        says="unmasked",
        never=("'bf16'",),
    ),
    "a fault after the scale has settled": Fault(
        Late,
        "loss",
        "log",
        "torch.log(loss.detach() * 0)",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'",),
    ),
    "a gradient inside that overflows": Fault(
        lambda cured: Net(through("inner"), inner=Inner(cured)),
        "backward",
        scaler=2.0**14,
        says="a loss scale of",
        remedy="scale",
    ),
}

FAULTS: dict[str, Fault] = {
    "an exponential in an InfoNCE loss": Fault(
        lambda cured: Net(scalar("contrast"), contrast=Contrast(cured)),
        "forward",
        "exp",
        "torch.exp(sim)",
        "contrast",
        says="subtract the maximum",
        remedy="bf16",
    ),
    "attention scores between modules": Fault(
        lambda cured: Net(through("attention"), attention=Attention(cured)),
        "forward",
        "matmul",
        "q @ k.T",
        "attention",
        remedy="fp32_modules",
    ),
    "an activation of 1e5": Fault(
        lambda cured: Net(through("middle"), middle=Amplifier(10.0 if cured else 1e5)),
        "forward",
        "mul",
        "* self.by",
        "middle",
        remedy="bf16",
    ),
    "a square in half": Fault(
        lambda cured: Net(scalar("energy"), energy=Energy(cured)),
        "forward",
        "sum",
        ".pow(2).sum(",
        "energy",
        remedy="operation in fp32",
    ),
    "0/0 in a normalisation": Fault(
        lambda cured: Net(normalised(cured)),
        "forward",
        "div",
        "out / length",
        None,
        "not finite",
        data=lambda cured: _zero_row(),
        says="an epsilon in the divisor",
        never=("bf16", "fp32_modules", "scale"),
    ),
    "a logarithm of 0": Fault(
        lambda cured: Net(log_of_zero(cured)),
        "loss",
        "log",
        "torch.log(",
        None,
        "not finite",
        says="an epsilon in the argument of `log`",
        never=("bf16", "fp32_modules"),
        remedy="epsilon",
    ),
    "a root at 0 in a distance": Fault(
        lambda cured: Net(distance(cured)),
        "backward",
        "sqrt",
        "torch.sqrt(",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'", "fp32_modules", "nothing, if"),
        remedy="epsilon",
    ),
    "a root at 0 in bf16": Fault(
        lambda cured: Net(distance(cured)),
        "backward",
        "sqrt",
        "torch.sqrt(",
        None,
        "not finite",
        "bf16",
        says="an epsilon",
        never=("'bf16'", "fp32_modules", "nothing, if"),
        remedy="epsilon",
    ),
    "an angle of 0": Fault(
        lambda cured: Net(angle(cured)),
        "backward",
        "acos",
        "torch.acos(",
        None,
        "not finite",
        says="an epsilon",
        never=("'bf16'",),
        remedy="epsilon",
    ),
    "a row that is masked entirely": Fault(
        lambda cured: Net(masked_row(cured)),
        "loss",
        "softmax",
        "torch.softmax(scores",
        None,
        "not finite",
        says="unmasked",
        never=("'bf16'", "fp32_modules", "scale"),
        remedy="finite mask",
    ),
    "a batch without a label": Fault(
        lambda cured: Net(no_labels(cured)),
        "loss",
        "div",
        "each.sum() / ",
        None,
        "not finite",
        data=labelled(),
        says="a divisor is 0",
        never=("'bf16'", "fp32_modules", "smaller"),
    ),
    "the spread of one value": Fault(
        lambda cured: Net(advantage(cured)),
        "loss",
        "std",
        "value.std()",
        None,
        "not finite",
        says="`correction=0`",
        never=("'bf16'",),
    ),
    "a learning rate that diverges": Fault(
        Diverges,
        "",
        "",
        "",
        None,
        "not finite",
        "fp32",
        says="a lower learning rate",
        never=("'bf16'",),
    ),
    "an outlier whose square leaves float32": Fault(
        lambda cured: Net(outlier(cured)),
        "forward",
        "square",
        ".square()",
        None,
        "not finite",
        "bf16",
        data=with_row(6, 1e25),
        says="an outlier in the data",
        never=("'bf16'", "'fp32'"),
    ),
    "the ratio of a policy gradient": Fault(
        lambda cured: Net(huge_ratio(cured)),
        "loss",
        "exp",
        "torch.exp(",
        None,
        "not finite",
        says="",
        never=("'bf16'",),
    ),
    "the log-variance of a VAE": Fault(
        lambda cured: Net(kl(cured)),
        "loss",
        "exp",
        "log_var.exp()",
        None,
        says="",
        remedy="operation in fp32",
    ),
    "an epsilon that float16 does not hold": Fault(
        lambda cured: Net(small_epsilon(cured)),
        "forward",
        "div",
        "z / norm",
        None,
        says="an epsilon that float16 holds (1e-6, tried: works)",
        remedy="bf16",
    ),
    "a running sum in half": Fault(
        lambda cured: Net(sum_in_half(cured)),
        "loss",
        "cumsum",
        ".cumsum(0)",
        None,
    ),
    "a cast of a large constant": Fault(
        lambda cured: Net(cast(cured)),
        "loss",
        "to",
        "target.half()",
        None,
        says="float32",
    ),
    "a weight that is NaN": Fault(NanWeight, "weights", module="encoder.2", in_fp32="not finite", says="checkpoint"),
    "a buffer that is NaN": Fault(
        lambda cured: Net(through("positions"), positions=Table(cured)),
        "weights",
        module="positions",
        in_fp32="not finite",
        says="",
    ),
    "a batch with NaN": Fault(
        lambda cured: Net(mse),
        "batch",
        in_fp32="not finite",
        module="encoder.0",
        data=with_row(6, float("nan")),
        says="clean the data",
    ),
    "a batch with infinity in bf16": Fault(
        lambda cured: Net(mse),
        "batch",
        in_fp32="not finite",
        module="encoder.0",
        precision="bf16",
        data=with_row(6, float("inf")),
        says="clean the data",
    ),
    "a loss that is summed": Fault(SummedLoss, "backward", says="dividing the loss", remedy="divisor"),
    "a static scale that is too high": Fault(
        lambda cured: Net(lambda m, b: mse(m, b) * 300),
        "backward",
        scaler=2.0**20,
        says="a loss scale of",
        remedy="scale",
        cured={"scaler": 0.25},
    ),
    "two optimizers": Fault(
        Gan, "loss", "log", "torch.log(p)", None, "not finite", says="an epsilon", never=("'bf16'",)
    ),
    "a hidden state that grows": Fault(Recurrent, "forward", "linear", "self.cell(state)", "cell", remedy="bf16"),
    "labels with holes that are masked": Fault(
        PlainNan, "loss", "square", "(out * 1000).square()", None, data=holes, remedy="operation in fp32"
    ),
}

FAULTS.update(MORE)


def _zero_row() -> Any:
    data = torch.cat(list(plain_data()))
    data[5] = 0
    return DataLoader(data, batch_size=4)
