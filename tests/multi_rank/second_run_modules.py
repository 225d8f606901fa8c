"""Modules that are sharded in several ways. `second_run_scenarios.py` trains them with and without our callbacks."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from multi_rank.ranks import Infinite
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

WIDTH, TOKENS, LENGTH = 8, 32, 6
BATCHES, VALIDATION, SIZE = 6, 2, 4
TROUBLE = {(1, 2): "nan", (0, 4): "gradient"}
"""By (replica, batch): "nan" is a loss and gradients that are not finite, "gradient" only the gradients."""
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A residual block. Tensor parallelism splits `up` by columns and `down` by rows."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Split(L.LightningModule):
    """Shards `net` and the units in it as `layout` says; counts its steps in attributes.

    Args:
        layout: "fsdp2", "policy" (with a MixedPrecisionPolicy), "offload", "hsdp", "tp", "fsdp2 tp"; every other one,
            such as "fsdp1" and "fsdp1 half" (with a MixedPrecision), is left to the strategy.
        trouble: Batches whose loss or gradient is not finite.
        dropout: The dropout of blocks.
    """

    net: nn.Module
    units: tuple[type[nn.Module], ...] = (Block,)

    lr = 0.01

    def __init__(self, layout: str, trouble: dict[tuple[int, int], str] | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.layout, self.trouble, self.dropout = layout, trouble or {}, dropout
        self.tensor_parallel = 2 if "tp" in layout else 1
        self.seen: list[int] = []
        self.num_steps, self.is_split = 0, False
        self.build()

    def build(self) -> None:
        blocks = [Block(dropout=self.dropout) for _ in range(2)]
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), *blocks, nn.Linear(16, 1))

    # -- sharding --

    def configure_model(self) -> None:
        if self.is_split:
            return
        self.is_split = True
        if "tp" in self.layout:
            for module in self.modules():
                if isinstance(module, Block):
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(module, self.device_mesh["tensor_parallel"], plan)
        if self.layout.startswith(("fsdp2", "policy", "offload", "hsdp")):
            self.shard(self.net)

    def shard(self, net: nn.Module, **options: Any) -> None:
        """Shard units, and then the rest."""
        options["mesh"] = self.device_mesh["data_parallel"]
        if self.layout == "hsdp":
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if self.layout == "policy":
            options["mp_policy"] = POLICY
        if self.layout == "offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for module in [*(m for m in net.modules() if isinstance(m, self.units)), net]:
            fully_shard(module, **options)

    pretended_replica: int | None = None

    @property
    def replica(self) -> int:
        if self.pretended_replica is not None:
            return self.pretended_replica
        return self.global_rank // self.tensor_parallel

    # -- steps --

    def begin(self, batch_idx: int) -> None:
        self.num_steps += 1
        self.seen.append(batch_idx)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        return F.mse_loss(self.net(x).float(), x.sum(1, keepdim=True))

    def spoilt(self, loss: Tensor, batch_idx: int) -> Tensor:
        kind = self.trouble.get((self.replica, batch_idx))
        if kind == "gradient":
            return Infinite.apply(loss)
        return loss * torch.nan if kind else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begin(batch_idx)
        loss = self.spoilt(self.loss(batch), batch_idx)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(-batch_idx)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def trained(self) -> list[nn.Parameter]:
        # FSDP1's optimizers take the parameters of the wrapped module
        model = self.trainer.model if self.layout.startswith("fsdp1") else self
        return [p for p in model.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trained(), lr=self.lr)

    def loader(self, training: bool = True) -> Any:
        """Return this replica's batches: numbers [4, 8], and tokens [4, 6]."""
        draws = torch.Generator().manual_seed(10 * self.replica + training)
        count = SIZE * (BATCHES if training else VALIDATION)
        x, tokens = torch.randn(count, WIDTH, generator=draws), torch.randint(TOKENS, (count, LENGTH), generator=draws)
        return DataLoader(TensorDataset(x, tokens), batch_size=SIZE)

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return self.loader(training=False)


class TokenBlock(nn.Module):
    """Attention and a :class:`Block`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.after = Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.after(x + self.out(mixed))


class Language(nn.Module):
    """A transformer whose head has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.blocks = nn.Sequential(TokenBlock(), TokenBlock())
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Tied(Split):
    units = (TokenBlock,)

    def build(self) -> None:
        self.net = Language()

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[1]
        return F.cross_entropy(self.net(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Llama(Split):
    """The Llama of transformers."""

    def build(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": TOKENS}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=LENGTH, use_cache=False))
        self.units = (LlamaDecoderLayer,)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[1], labels=batch[1]).loss


class Experts(nn.Module):
    """Route each row to one of four experts, and count the rows of each in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.loads = [0] * 4

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):  # with no rows, too: ranks reduce the same gradients
            rows = (chosen == number).nonzero()[:, 0]
            self.loads[number] += len(rows)
            out = out.index_add(0, rows, (expert(x[rows]) * gate[rows, None]).to(out.dtype))
        return x + out


class Routed(Split):
    units = (Experts, Block)

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Experts(), Block(), nn.Linear(16, 1))


class Normed(Split):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), Block(), nn.Linear(16, 1))


class Base(nn.Linear):
    """A layer that is a unit of its own: a unit has parameters of one dtype."""


class Adapter(nn.Module):
    """A frozen layer in bfloat16, and two small trained matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Base(16, 16).to(torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x)).to(x.dtype)


class Adapted(Split):
    units = (Base, Block)

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Adapter(), Adapter(), Block(), nn.Linear(16, 1))


class Manual(Split):
    """Two optimizers by hand; the fourth batch only accumulates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def configure_model(self) -> None:
        if self.layout.startswith("fsdp1") and not self.is_split:  # FSDP1 forbids a backward inside of a unit's forward
            device = torch.device("cpu")
            for i, part in enumerate(self.net):
                self.net[i] = FullyShardedDataParallel(part, device_id=device, use_orig_params=True)
        super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch_idx)
        for optimizer in self.optimizers():
            loss = self.spoilt(self.loss(batch), batch_idx)
            self.manual_backward(loss)
            if batch_idx == 3:
                continue
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.log("train_loss", loss.detach())

    def configure_optimizers(self) -> Any:
        first = {id(p) for p in self.net[0].parameters()}
        parameters = self.trained()
        return [
            torch.optim.AdamW([p for p in parameters if id(p) in first], lr=0.01),
            torch.optim.SGD([p for p in parameters if id(p) not in first], lr=0.01, momentum=0.9),
        ]


class Teacher(Split):
    """A step edits the weights of a teacher; so does validation."""

    def build(self) -> None:
        super().build()
        student, self.teacher = self.net, nn.Module()
        super().build()
        self.teacher, self.net = self.net.requires_grad_(False), student

    def configure_model(self) -> None:
        if not self.is_split:
            super().configure_model()
            if self.layout in ("fsdp2", "policy", "offload", "hsdp"):
                self.shard(self.teacher, reshard_after_forward=True)

    @torch.no_grad()
    def follow(self) -> None:
        for unit in self.net.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        self.follow()
        with torch.no_grad():
            target = self.teacher(batch[0])
        return super().loss(batch) + F.mse_loss(self.net(batch[0]).float(), target.float())


class Keeper(Split):
    """Metrics, lists, random numbers of Python, and a hook whose closure appends to a list of the module."""

    def build(self) -> None:
        super().build()
        self.error, self.mean = MeanSquaredError(), MeanMetric()
        self.norms: list[float] = []
        self.draws: list[float] = []
        norms = self.norms
        self.net[1].register_forward_hook(lambda module, args, out: norms.append(float(out.detach().float().norm())))

    def begin(self, batch_idx: int) -> None:
        super().begin(batch_idx)
        self.draws.append(random.random())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x = batch[0]
        self.error(self.net(x).float(), x.sum(1, keepdim=True))
        self.mean(x.mean())
        self.log_dict({"error": self.error, "mean": self.mean})


class Recomputed(nn.Module):
    """Computes a block again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Checkpointed(Split):
    units = (Recomputed,)

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), Recomputed(), Recomputed(), nn.Linear(16, 1))


class Compiled(Split):
    def configure_model(self) -> None:
        if not self.is_split:
            for block in self.net[1:3]:
                block.compile(backend="eager")
        super().configure_model()


class StepsInHooks(Split):
    """An optimizer of each parameter steps as soon as its gradient is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self) -> None:
        self.own = {parameter: torch.optim.SGD([parameter], lr=0.01, momentum=0.9) for parameter in self.trained()}
        for parameter in self.own:
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter: Any) -> None:
        self.own[parameter].step()
        self.own[parameter].zero_grad()
        self.num_steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch_idx)
        self.manual_backward(self.loss(batch))


class Uneven(Split):
    """The last batch of replica 1 has one row."""

    def loader(self, training: bool = True) -> Any:
        whole = super().loader(training)
        missing = SIZE - 1 if self.replica == 1 else 0
        tensors = [t[: len(t) - missing] for t in whole.dataset.tensors]
        return DataLoader(TensorDataset(*tensors), batch_size=SIZE)


class Branched(Split):
    """Every third batch takes a branch of its own."""

    def build(self) -> None:
        super().build()
        self.net = Choice(self.net)

    def loss(self, batch: Any) -> Tensor:
        self.net.branches = self.seen[-1] % 3 == 2
        return super().loss(batch)


class Choice(nn.Module):
    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main, self.other, self.branches = main, Block(WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        return self.main(self.other(x) if self.branches else x)
