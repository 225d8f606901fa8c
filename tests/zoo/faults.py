"""Planted faults of training from real projects, each with its cause and its cure.

Each fault is declared beside its code: a loss, a part of a net, or a whole module, ill or cured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp import AmpPrecision
from zoo.registry import Entry, add, entries

WIDTH = 8


class Net(L.LightningModule):
    """A perceptron with a given loss."""

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


class Ill(Net):
    """A fault in the step of a module."""

    def __init__(self, cured: bool, **parts: nn.Module) -> None:
        super().__init__(None, **parts)
        self.cured = cured


class Part(nn.Module):
    """A fault in a part of a net."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured


# -- data --------------------------------------------------------------------------------------------------------------


def plain_data(batches: int = 4, rows: int = 4) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randn(batches * rows, WIDTH, generator=generator), batch_size=rows)


def edited(edit: Callable[[Tensor], Any], cured: bool = False) -> Any:
    """The same rows, one or more of them faulty."""
    data = torch.cat(list(plain_data()))
    if not cured:
        edit(data)
    return DataLoader(data, batch_size=4)


def with_row(row: int, value: float) -> Callable[[bool], Any]:
    return partial(edited, lambda data: data[row].__setitem__(3, value))


def labelled(cured: bool) -> Any:
    """The second batch has no labels."""
    x, y = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(16) % WIDTH
    y[4:8] = -100
    return DataLoader(TensorDataset(x, y), batch_size=4)


def holes(cured: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)
    y[::3] = float("nan")
    return DataLoader(TensorDataset(x * 3, y), batch_size=4)


# -- what a fault is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault(Entry):
    """One fault, and the report that is expected.

    Attributes:
        make: Makes the module, ill or cured.
        cause: The reported cause.
        operation: Name of the blamed operation; empty if the report names none.
        line: Part of the named line of code.
        module: The named module.
        in_fp32: Whether fp32 is finite.
        precision: The precision of the run.
        data: Batches.
        says: Words that the advice must contain.
        never: Words that the advice must not contain.
        remedy: The beginning of a remedy that must have worked.
        scaler: The scaler of the plugin.
        is_taken: Whether the steps are taken.

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
    cured: dict[str, Any] = field(default_factory=dict)

    def plugin(self, cured: bool = False) -> AmpPrecision:
        arguments = {"precision": self.precision, "scaler": self.scaler, **(self.cured if cured else {})}
        return AmpPrecision(**arguments)

    def loader(self, cured: bool = False) -> Any:
        return plain_data() if self.data is None else self.data(cured)


def mse(module: Any, batch: Tensor) -> Tensor:
    return F.mse_loss(module.head(module.encoder(batch)).float(), batch.sum(1, keepdim=True))


def through(name: str) -> Callable[[Any, Tensor], Tensor]:
    """A regression on the output of a part after the encoder."""

    def loss(module: Any, batch: Tensor) -> Tensor:
        out = getattr(module, name)(module.encoder(batch))
        return F.mse_loss(module.head(out).float(), batch.sum(1, keepdim=True))

    return loss


def mean_of(name: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, batch: getattr(module, name)(module.encoder(batch)).float().mean()


BF16 = 'AmpPrecision("bf16")'
LOSS = "the loss in fp32"

T = TypeVar("T", bound=Callable[..., Any])


def fault(
    name: str,
    cause: str,
    operation: str = "",
    line: str = "",
    *,
    part: str = "",
    loss: Callable[[str], Callable[[Any, Tensor], Tensor]] = through,
    **expected: Any,
) -> Callable[[T], T]:
    """Plant the function below: a module, a loss of a net, a batch and `cured`, or a `part` of a net."""

    def plant(ill: T) -> T:
        found = cast("Any", ill)
        if part:
            expected.setdefault("module", part)
            make: Callable[[bool], Any] = lambda cured: Net(loss(part), **{part: found(cured)})  # noqa: E731
        else:
            make = found if isinstance(found, type) else lambda cured: Net(partial(found, cured=cured))
        add(Fault(name=name, cause=cause, operation=operation, line=line, make=make, **expected))
        return ill

    return plant


WRONG: dict[str, Any] = {"in_fp32": "not finite", "never": ("bf16",)}
"""Wrong in every precision."""
EPSILON: dict[str, Any] = WRONG | {"says": "an epsilon"}
DIVISOR: dict[str, Any] = EPSILON | {"says": "an epsilon in the divisor"}
MASK: dict[str, Any] = WRONG | {"says": "unmasked"}


# -- the range of fp16 -------------------------------------------------------------------------------------------------


@fault(
    "an exponential in an InfoNCE loss", "forward", "exp", "torch.exp(sim)", part="contrast", loss=mean_of,
    says="subtract the maximum", remedy=BF16,
)  # fmt: skip
class Contrast(Part):
    """InfoNCE by hand."""

    def forward(self, z: Tensor) -> Tensor:
        z = z * 3.6 / z.norm(dim=-1, keepdim=True)
        sim = (z @ z.T).half() if z.dtype != torch.bfloat16 else z @ z.T
        if self.cured:
            return (torch.logsumexp(sim, -1) - sim.diagonal()).mean()
        log_z = torch.log(torch.exp(sim).sum(-1))
        return (log_z - sim.diagonal()).mean()


@fault("attention scores between modules", "forward", "matmul", "q @ k.T", part="attention", remedy="fp32_modules")
class Attention(Part):
    """Scores between modules, without the usual divisor."""

    def __init__(self, cured: bool) -> None:
        super().__init__(cured)
        self.query, self.key, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x) * 900, self.key(x) * 900
        scores = (q / 1e4) @ k.T if self.cured else q @ k.T
        return self.proj(torch.softmax(scores.float() / 1e4, -1) @ x)


@fault(
    "the log-variance of a VAE", "loss", "exp", "log_var.exp()", remedy=LOSS,
    says="keep the argument of `exp` small (`.clamp(max=...)`) (not tried)",
)  # fmt: skip
def kl(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """An unbounded function."""
    z = module.encoder(batch)
    log_var = (z + 13).half() if not cured else (z + 5).float()
    mean = z.float()
    return -0.5 * (1 + log_var - mean**2 - log_var.exp()).float().mean()


@fault(
    "an epsilon that float16 does not hold", "forward", "div", "z / norm",
    says="an epsilon that fp16 holds", remedy=BF16,
)  # fmt: skip
def small_epsilon(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """1e-8 is 0 in float16."""
    z = module.encoder(batch)
    z = z.half() if z.dtype != torch.bfloat16 else z
    z = z * (torch.arange(len(z)) > 0)[:, None].to(z.dtype)
    norm = z.abs().sum(-1, keepdim=True) + (1e-3 if cured else 1e-8)
    return module.head(z / norm).float().square().mean()


@fault(
    "a loss that is summed in half", "loss", "sum", "(errors.float() if cured else errors).sum()",
    says="sum gave 115,000, fp16 ends at 65,504: it adds up 32 finite values",
    remedy=LOSS,
)  # fmt: skip
def errors_summed(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """Each error fits into float16, their sum does not."""
    errors = (module.encoder(batch).half() - 60.0).square()
    return (errors.float() if cured else errors).sum().float()


@fault("a cast of a large constant", "loss", "to", "target.half()", says="keep that tensor in float32")
def to_half(module: Any, batch: Tensor, cured: bool) -> Tensor:
    z = module.encoder(batch)
    target = (batch.sum(1, keepdim=True) + 1e5) * 1.0
    return ((z.float() - (target if cured else target.half()).float()) / 1e5).square().mean()


@fault(
    "a loss that is summed",
    "backward",
    says="dividing the loss by 2**30 or more, and the `eps` of Adam too",
    remedy="dividing the loss",
)
def summed(module: Any, batch: Tensor, cured: bool) -> Tensor:
    loss = mse(module, batch) * 1e8
    return loss / 2**30 if cured else loss


@fault(
    "a static scale that is too high", "backward", scaler=2.0**20, says="gave a true gradient", remedy="scaler=",
    cured={"scaler": 0.25},
)  # fmt: skip
def large(module: Any, batch: Tensor, cured: bool) -> Tensor:
    return mse(module, batch) * 300


@fault(
    "a gradient inside that overflows", "backward", part="inner", module=None, scaler=2.0**14,
    says="gave a true gradient", remedy="scaler=",
)  # fmt: skip
class Inner(Part):
    """The gradient inside is 300 times as large as the gradient of any parameter."""

    def __init__(self, cured: bool) -> None:
        super().__init__(cured)
        self.gain = 1.0 if cured else 300.0
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / self.gain) * self.gain


@fault(
    "labels with holes that are masked", "loss", "square", "(out * 1000).square()", data=holes,
    remedy=LOSS,
)  # fmt: skip
def masked_holes(module: Any, batch: Any, cured: bool) -> Tensor:
    """The missing values are handled; another value is wrong."""
    x, y = batch
    out = module.encoder(x)
    out = out.half() if out.dtype != torch.bfloat16 and not cured else out.float()
    known = torch.isfinite(y)
    energy = (out * 1000).square().float()
    return ((energy - y)[known] / 1e5).mean()


@fault(
    "a sigmoid that is 1 in fp16", "loss", "log", "torch.log(1 - fooled)",
    says="an argument is 0, which it is not in fp32",
    never=("epsilon", "bf16"), remedy="fp32_modules",
)  # fmt: skip
@fault(
    "a sigmoid that is 1 in bf16", "loss", "log", "torch.log(1 - fooled)", precision="bf16",
    says="`F.logsigmoid`", never=("epsilon",), remedy="fp32_modules",
)  # fmt: skip
class Generator(Ill):
    """`log(1 - D(x))` by hand, for a sigmoid that is 1 in half precision but not in float32."""

    def __init__(self, cured: bool) -> None:
        super().__init__(cured, critic=nn.Linear(WIDTH, 1))
        nn.init.constant_(self.critic.bias, 9.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        score = self.critic(self.encoder(batch))
        fooled = torch.sigmoid(score.float() if self.cured else score)
        return -torch.log(1 - fooled).float().mean()


# -- wrong in every precision ------------------------------------------------------------------------------------------


@fault(
    "a logarithm of 0", "loss", "log", "torch.log(", in_fp32="not finite",
    says="an epsilon in the argument of `log`", never=("bf16", "fp32_modules"),
)  # fmt: skip
def log_of_zero(module: Any, batch: Tensor, cured: bool) -> Tensor:
    p = torch.relu(module.encoder(batch)).float().sum(-1) * 0 + (batch[:, 0] > 0).float()
    p = p + module.head(module.encoder(batch)).float().squeeze() * 0
    return -torch.log(p + 1e-6 if cured else p).mean()


ROOT = EPSILON | {"never": ("bf16", "fp32_modules", "nothing, if")}


@fault("a root at 0 in fp32", "backward", "sqrt", "torch.sqrt(", precision="fp32", **ROOT)
@fault(
    "a root at 0 in bf16", "backward", "sqrt", "torch.sqrt(", precision="bf16",
    **ROOT | {"says": "; no precision helps"},
)  # fmt: skip
def distance(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """The derivative of a root at 0: the diagonal of a matrix of distances."""
    z = module.encoder(batch).float()
    squared = (z[:, None] - z[None]).square().sum(-1)
    return torch.sqrt(squared + 1e-6 if cured else squared).mean()


@fault("a root of a negative number", "loss", "sqrt", "torch.sqrt(", **EPSILON | {"says": "below 0"})
def negative_root(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """A variance as the difference of two means."""
    z = module.encoder(batch).float()
    variance = (z * 0 - 1e-4) + z.square().mean() * 0
    return torch.sqrt(variance.clamp(min=1e-6) if cured else variance).mean() + z.mean()


@fault("an angle of 0", "backward", "acos", "torch.acos(", **EPSILON)
def angle(module: Any, batch: Tensor, cured: bool) -> Tensor:
    z = F.normalize(module.encoder(batch).float(), dim=-1)
    cosine = (z * z.detach()).sum(-1) * 0 + 1 + z.sum(-1) * 0
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6) if cured else cosine).mean()


@fault("an exponent below 1", "backward", "pow", "torch.pow(", **EPSILON)
def power(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """A focal loss with an exponent below 1, at 0."""
    p = module.encoder(batch).float()
    p = p * (p > 0)
    return torch.pow(p + 1e-6 if cured else p, 0.5).mean()


@fault("advantages that are all equal", "loss", "div", "advantage.std()", precision="bf16", **DIVISOR)
def policy(module: Any, batch: Tensor, cured: bool) -> Tensor:
    value = module.head(module.encoder(batch)).float().squeeze(-1)
    advantage = value.detach() * 0 + 1
    scaled = (advantage - advantage.mean()) / (advantage.std() + (1e-8 if cured else 0))
    return (scaled * value).mean()


@fault(
    "a batch without a label", "loss", "div", "each.sum() / ", in_fp32="not finite", data=labelled,
    says="a divisor is 0", never=("bf16", "fp32_modules", "smaller"),
)  # fmt: skip
def no_labels(module: Any, batch: Any, cured: bool) -> Tensor:
    x, y = batch
    known = y != -100
    each = (module.head(module.encoder(x)).float().squeeze(-1) - y).square() * known
    return each.sum() / (known.sum().clamp(min=1) if cured else known.sum())


@fault(
    "labels that are all ignored", "loss", "cross_entropy", "F.cross_entropy(logits, y)", data=labelled,
    says="divide by `max(1, count)`", is_taken=True, **WRONG,
)  # fmt: skip
@fault(
    "labels that are all ignored in bf16", "loss", "cross_entropy", "F.cross_entropy(logits, y)", precision="bf16",
    in_fp32="not finite", data=labelled, says="although its loss is not finite", is_taken=True,
)  # fmt: skip
def ignored(module: Any, batch: Any, cured: bool) -> Tensor:
    """A batch without a label: its loss is NaN, its gradients are 0."""
    x, y = batch
    logits = module.encoder(x).float()
    if cured:
        return F.cross_entropy(logits, y, reduction="sum") / max(1, int((y != -100).sum()))
    return F.cross_entropy(logits, y)


@fault("the spread of one value", "loss", "std", "value.std()", says="`correction=0`", **WRONG)
def advantage(module: Any, batch: Tensor, cured: bool) -> Tensor:
    """Reinforcement learning: an episode of one step has no standard deviation."""
    value = module.head(module.encoder(batch[:1])).float().squeeze(-1)
    spread = value.std(correction=0) + 1e-6 if cured else value.std()
    return ((value - value.mean()) / spread).mean() + value.square().mean()


@fault(
    "a row that is masked entirely", "loss", "softmax", "torch.softmax(scores",
    **MASK | {"never": ("bf16", "fp32_modules", "scale")},
)  # fmt: skip
def masked_row(module: Any, batch: Tensor, cured: bool) -> Tensor:
    z = module.encoder(batch)
    scores = (z @ z.T).float()
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[2] = False
    if cured:
        keep[2, 2] = True
    scores = scores.masked_fill(~keep, float("-inf"))
    weights = torch.softmax(scores, -1)
    return (weights @ z.float()).float().square().mean()


@fault(
    "a sample that is all padding", "forward", "multi_head_attention_forward", "self.attention(x, x, x",
    module="attention", **MASK,
)  # fmt: skip
class Student(Ill):
    """Distillation: the padding mask hides all of one sample."""

    def __init__(self, cured: bool) -> None:
        super().__init__(cured, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.encoder(batch).view(2, -1, WIDTH)
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[1] = True
        if self.cured:
            padded[1, 0] = False
        out, _ = self.attention(x, x, x, key_padding_mask=padded)
        return self.head(out).float().square().mean()


@fault(
    "an outlier whose square leaves float32", "forward", "square", ".square()", in_fp32="not finite", precision="bf16",
    data=with_row(6, 1e25), says="an outlier in the data, or weights that grow (not tried); no precision helps",
    never=("bf16", "'fp32'"),
)  # fmt: skip
def outlier(module: Any, batch: Tensor, cured: bool) -> Tensor:
    powers = F.layer_norm(batch.square() if not cured else batch.clamp(-5, 5).square(), (WIDTH,))
    return module.head(module.encoder(powers)).float().square().mean()


# -- what no operation is to blame for ---------------------------------------------------------------------------------


@fault("a learning rate that diverges", "", precision="fp32", says="a lower learning rate", **WRONG)
class Diverges(Net):
    def __init__(self, cured: bool) -> None:
        super().__init__(mse)
        self.lr = 1e-3 if cured else 1e4


@fault(
    "a learning rate that becomes NaN", "learning rate", precision="fp32",
    says="is not finite since step 4, whose learning rate was NaN", **WRONG,
)  # fmt: skip
class Scheduled(Ill):
    """A schedule that divides by a number that becomes 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return mse(self, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        decay = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0])
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: float(decay[min(step, 4)] / (decay[min(step, 3 if self.cured else 4)]))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@fault("a weight that is NaN", "weights", module="encoder.2", in_fp32="not finite", says="checkpoint")
class NanWeight(Net):
    def __init__(self, cured: bool) -> None:
        super().__init__(mse)
        if not cured:
            self.encoder[2].weight.data[1, 2] = float("nan")


@fault("a buffer that is NaN", "weights", part="positions", in_fp32="not finite")
class Table(nn.Module):
    """Positions, one of which was never initialised."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH))
        if not cured:
            self.table[2] = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


BAD_BATCH: dict[str, Any] = {"in_fp32": "not finite", "module": "encoder.0", "says": "the data; no precision helps"}


@fault("a batch with NaN", "batch", data=with_row(6, float("nan")), **BAD_BATCH)
def healthy(module: Any, batch: Tensor, cured: bool) -> Tensor:
    return mse(module, batch)


FAULTS = entries(Fault)
