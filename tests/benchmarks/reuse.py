"""Measure errors, copies and time of a weight that a step uses many times: `python -m tests.benchmarks.reuse`.

Prints a Markdown table. The gradient of the same loss is taken four ways: in fp32, with Lightning's own plugin (a cast
per use), with autocast's cache on (plain torch), and with ours. fp16 runs at the plugins' default scale of 2**16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from tests.benchmarks._models import Timed, UnrolledLSTM
from tests.benchmarks._pairs import Turns, fit, pair, start
from tests.benchmarks.steps import compare, lightnings, ours

WIDTH, BATCH = 64, 16


class Cached(MixedPrecision):
    """Plain torch's autocast, with its default settings."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.precision == "bf16-mixed" else torch.half)


class Loop(nn.Module):
    """A module that uses one layer `uses` times."""

    def __init__(self, kind: str, uses: int) -> None:
        super().__init__()
        self.kind, self.uses = kind, uses
        self.layer: Any = {
            "GRUCell": nn.GRUCell,
            "LSTMCell": nn.LSTMCell,
            "Linear": nn.Linear,
            "F.linear": nn.Linear,
            "Conv1d": lambda n, m: nn.Conv1d(n, m, 3, padding=1),
            "nn.GRU": lambda n, m: nn.GRU(n, m, batch_first=True),
        }[kind](WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs [uses, batch, ...], because a gradient summed over every use has the largest error."""
        if self.kind == "nn.GRU":
            return self.layer(x[:, None] * torch.linspace(0.5, 1.5, self.uses)[None, :, None])[0]
        if self.kind == "Conv1d":
            x = x[:, :, None].expand(-1, -1, 4)
        state: Any = torch.zeros_like(x)
        if self.kind == "LSTMCell":
            state = (state, state)
        outputs: list[Tensor] = []
        for step in range(self.uses):
            now = x * (0.5 + step / self.uses)
            if self.kind.endswith("Cell"):
                state = self.layer(now, state)
            elif self.kind == "F.linear":
                state = torch.tanh(nn.functional.linear(state, self.layer.weight, self.layer.bias) + now)
            else:
                state = torch.tanh(self.layer(state) + now)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


class Looks(L.LightningModule):
    """Keep the weights; record the last step's true gradient and how many copies of a weight its backward held."""

    def __init__(self, net: Loop) -> None:
        super().__init__()
        self.net = net
        self.gradient = torch.empty(0)
        self.copies = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        shape = max((p.shape for p in self.net.parameters()), key=lambda shape: shape.numel())
        held: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.numel() == shape.numel() and set(tensor.shape) == set(shape):
                held.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.net(batch).float().square().mean()
        self.copies = len(held)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]).double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def look(kind: str, uses: int, plugin: Any, batch: Tensor) -> Looks:
    torch.manual_seed(0)
    module = Looks(Loop(kind, uses))
    fit(module, plugin, Turns.alone(3), batch)
    return module


def stock(precision: str, kind: type[MixedPrecision] = MixedPrecision) -> MixedPrecision:
    return kind("bf16-mixed", "cpu") if precision == "bf16" else kind("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def row(kind: str, uses: int, precision: str, batch: Tensor) -> str:
    reference = look(kind, uses, Precision(), batch).gradient
    error: Callable[[Looks], float] = lambda m: float((m.gradient - reference).norm() / reference.norm())  # noqa: E731
    per_use = look(kind, uses, stock(precision), batch)
    cached = look(kind, uses, stock(precision, Cached), batch)
    mine = look(kind, uses, AmpPrecision(precision), batch)
    same = "bit-identical" if torch.equal(mine.gradient, per_use.gradient) else f"{error(mine):.2g}"

    def side(plugin: Any) -> Callable[[Turns], None]:
        return lambda turns: fit(Timed(Loop(kind, uses), torch.optim.SGD, lr=0.0), plugin, turns, batch)

    blocks = 9 if uses < 1000 else 5
    a, b = pair(side(AmpPrecision(precision)), side(stock(precision)), steps=1, blocks=blocks, warmup=3)
    ratios = sorted(theirs / mine for mine, theirs in zip(a, b, strict=True))
    return (
        f"| {kind} | {uses:,} | {precision} | {error(mine):.2g} | {error(per_use):.2g} ({same}) | {error(cached):.2g}"
        f" | {mine.copies}, {per_use.copies}, {cached.copies} | {ratios[len(ratios) // 2]:.2f} |"
    )


def main() -> None:
    start(f"One layer of width {WIDTH}, batch {BATCH}, used again and again; gradients against fp32")
    print(
        "\n| layer | uses | precision | error: `AmpPrecision` | error: a cast per use (Lightning) | error: autocast's"
        " cache (plain torch) | copies held in these three cases | times as fast as Lightning |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(BATCH, WIDTH, generator=generator)
    kinds = ("GRUCell", "LSTMCell", "Linear", "F.linear", "nn.GRU")
    for kind, precision, uses in itertools.product(kinds, ("bf16", "fp16"), (32, 512, 2048)):
        print(row(kind, uses, precision, batch), flush=True)
    print(row("Conv1d", 32, "bf16", batch), flush=True)

    start("Speed against Lightning's plugin")
    for width in (512, 256):
        sequence = torch.randn(32, 32, width, generator=generator)
        for precision in ("bf16", "fp16") if width == 256 else ("bf16",):
            plugins = [lambda p=precision: ours(p), lambda p=precision: lightnings(p)]
            compare(
                f"LSTM cell of width {width} x 32, {precision}",
                lambda w=width: UnrolledLSTM(w),
                sequence,
                *plugins,
                target=">= 2 (width 512)",
            )
    wide = torch.randn(32, 512, generator=generator)
    once = lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))  # noqa: E731
    compare("layers used once, bf16", once, wide, lambda: ours("bf16"), lambda: lightnings("bf16"), target=">= 1",
            steps=20, blocks=25)  # fmt: skip


if __name__ == "__main__":
    main()
