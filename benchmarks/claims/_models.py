"""The small models of the claims: a GPT with a cache, an MLP and a convolution net, and their data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import final

VOCABULARY = 32
Cache = dict[int, tuple[Tensor, Tensor]]
"""The keys and values of each block."""


@final
class Block(nn.Module):
    """A layer of a GPT with pre-normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None and x.shape[1] > 1)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x)), (k, v)


@final
class GPT(nn.Module):
    """A GPT over 32 tokens; takes tokens [batch, length] and returns logits [batch, length, 32]."""

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 2, context: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Cache | None = None, begin: int = 0) -> Tensor:
        """Continue from a cache, which is extended in place, if there is one."""
        places = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for number, block in enumerate(self.blocks):
            x, new = block(x, None if cache is None else cache.get(number))
            if cache is not None:
                cache[number] = new
        return self.head(self.norm(x))


def text(num: int, length: int, seed: int) -> Tensor:
    """Return tokens [num, length] of a fixed Markov chain; a GPT learns its transitions within some steps."""
    chain = (2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))).softmax(1)
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = [torch.randint(VOCABULARY, (num,), generator=generator)]
    for _ in range(length - 1):
        tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def text_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def output_loss(net: nn.Module, x: Tensor) -> Tensor:
    """Return a loss of models without labels."""
    return net(x).float().pow(2).mean()


@final
class Example(NamedTuple):
    """A model with its loss and a batch."""

    net: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    batch: Tensor


def small_mlp(device: torch.device) -> Example:
    """Return an MLP of 5 thousand parameters with 32 rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return Example(net.to(device), output_loss, torch.randn(32, 32).to(device))


def gpt(device: torch.device, width: int = 64, depth: int = 2, batch: int = 32, length: int = 64) -> Example:
    """Return a GPT."""
    torch.manual_seed(0)
    net = GPT(width, depth, max(1, width // 32), length)
    return Example(net.to(device), text_loss, text(batch, length + 1, 0).to(device))


def large_gpt(device: torch.device, *, tiny: bool) -> Example:
    """Return a GPT that keeps the device busy."""
    if tiny:
        return gpt(device, batch=2, length=16)
    return gpt(device, 1024, 8, 16, 512) if device.type == "cuda" else gpt(device, 128, 2, 4, 64)


def conv_net(device: torch.device) -> Example:
    """Return a convolution net with batch normalisation."""
    torch.manual_seed(0)
    sizes = [3, 16, 32, 32]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Example(net.to(device), output_loss, torch.randn(8, 3, 32, 32).to(device))


def examples(device: torch.device) -> dict[str, Example]:
    """Return the three models of the claims about memory."""
    return {"small MLP": small_mlp(device), "GPT": gpt(device), "conv net": conv_net(device)}
