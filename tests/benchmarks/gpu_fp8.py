"""Time fp8 against bf16, both compiled, on a GPU with fp8 products: `python -m tests.benchmarks.gpu_fp8`.

The blocks have the sizes of Llama 3 8B (without rotary embeddings, which are no matrix product), between an embedding
and a small head. For each recipe, bf16 and fp8 run interleaved in one process. Then peak memory and the gradient's
error are measured from the same weights and tokens. `--tiny` runs everything emulated, on a CPU or on `--device cuda`,
and proves only that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from tests.benchmarks._pairs import Turns, fit, pair, report, start

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Sizes(NamedTuple):
    dim: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    blocks: int = 4
    vocabulary: int = 4096
    batch: int = 4
    sequence: int = 4096
    accelerator: str = "cuda"
    backend: str = "inductor"
    emulated: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


TINY = Sizes(64, 128, 4, 2, 2, 64, 2, 32, "cpu", "aot_eager", True)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim, self.group = sizes.dim // sizes.heads, sizes.heads // sizes.kv_heads
        kv = self.head_dim * sizes.kv_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.q, self.k, self.v, self.o = (
            nn.Linear(sizes.dim, n, bias=False) for n in (sizes.dim, kv, kv, sizes.dim)
        )  # fmt: skip
        self.gate, self.up = (nn.Linear(sizes.dim, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))  # `enable_gqa` has no fast kernel in fp32
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(L.LightningModule):
    """Return the same weights each time. With `outliers`, every 64th channel is 30 times as large, as in trained
    models.
    """

    def __init__(self, sizes: Sizes, *, compiled: bool = True, outliers: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.gradients: dict[str, Tensor] = {}
        self.peak_gib = math.nan
        with torch.device(sizes.accelerator):
            torch.manual_seed(0)
            self.embed = nn.Embedding(sizes.vocabulary, sizes.dim)
            self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
            self.norm = nn.RMSNorm(sizes.dim)
            self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2 and "embed" not in name:
                    parameter.normal_(std=0.02)
            if outliers:
                self.embed.weight[:, ::64] *= 30
        if compiled:
            for block in self.blocks:
                block.compile(backend=sizes.backend)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.looks:
            # without the embedding: it is large, not in fp8, and would hide the other errors
            blocks = self.blocks.named_parameters()
            self.gradients = {n: p.grad.clone() for n, p in blocks if p.grad is not None}

    def on_train_end(self) -> None:
        if self.device.type == "cuda":
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


def tokens(sizes: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence + 1), generator=generator)


def plugin(recipe: str, sizes: Sizes) -> AmpPrecision:
    """Train a step; `recipe` may also be "bf16" or "fp32"."""
    if recipe not in RECIPES:
        return AmpPrecision(recipe)
    if not sizes.emulated:
        return AmpPrecision("fp8", fp8_recipe=recipe)
    from torchao.float8 import Float8LinearConfig

    return AmpPrecision("fp8", fp8_recipe=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))


def clean() -> None:
    # compiled code resets CUDA graphs at its end, which not every build of torch supports
    with contextlib.suppress(ImportError):
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def alone(module: Model, recipe: str, sizes: Sizes, steps: int) -> AmpPrecision:
    """Run a few steps with nothing beside them."""
    mine = plugin(recipe, sizes)
    fit(module, mine, Turns.alone(steps), tokens(sizes), accelerator=sizes.accelerator)
    return mine


def gradients(recipe: str, sizes: Sizes, *, outliers: bool = False) -> dict[str, Tensor]:
    clean()
    module = Model(sizes, compiled=recipe != "fp32", outliers=outliers, looks=True)
    alone(module, recipe, sizes, 1)
    return module.gradients


def peak_gib(recipe: str, sizes: Sizes) -> tuple[float, str]:
    """Return the peak memory of three whole steps, and how many layers run in fp8."""
    clean()
    module = Model(sizes)
    layers = list(alone(module, recipe, sizes, 3).fp8_layers.values())
    return module.peak_gib, f"{layers.count(None)} of {len(layers)}" if layers else "-"


def sqnr_db(values: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float, str]:
    """Return the SQNR of the whole gradient, and the worst SQNR of one weight's gradient, with its name."""
    power = {n: float(g.double().square().sum()) for n, g in exact.items()}
    noise = {n: float((values[n].double() - g.double()).square().sum()) for n, g in exact.items()}
    each = {n: 10 * math.log10(power[n] / noise[n]) for n in exact if noise[n] and power[n]}
    worst = min(each, key=each.__getitem__)
    return 10 * math.log10(sum(power.values()) / sum(noise.values())), each[worst], worst


def side(recipe: str, sizes: Sizes) -> Callable[[Turns], None]:
    return lambda turns: fit(Model(sizes), plugin(recipe, sizes), turns, tokens(sizes), accelerator=sizes.accelerator)


def compare(recipe: str, sizes: Sizes, **kwargs: int) -> tuple[list[float], list[float]]:
    """Return the seconds per step of each block of steps, in fp8 and in bf16; building order matters a little."""
    fp8, bf16 = side(recipe, sizes), side("bf16", sizes)
    clean()
    ours, theirs = pair(fp8, bf16, **kwargs)
    clean()
    theirs_again, ours_again = pair(bf16, fp8, **kwargs)
    return ours + ours_again, theirs + theirs_again


def describe(sizes: Sizes) -> None:
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torchao", "lightning"))
    if not sizes.emulated:
        device = torch.cuda.get_device_properties(0)
        what = f"{device.name} (sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB), CUDA"
        what += f" {torch.version.cuda}, {versions}"
    else:
        what = f"fp8 is emulated and the sizes are tiny, so no figure below means anything; {versions}"
    print(
        f"{what}\n{sizes.blocks} blocks, dim {sizes.dim}, ffn {sizes.ffn}, {sizes.heads} heads ({sizes.kv_heads} for"
        f" keys and values), {sizes.batch} x {sizes.sequence} tokens, AdamW (fused), backend {sizes.backend!r}\n"
        f"python -m tests.benchmarks.gpu_fp8 {' '.join(sys.argv[1:])}".rstrip(),
        flush=True,
    )


def row(name: str, times: list[float], ratios: list[float], sizes: Sizes, errors: list[str]) -> str:
    """Return one line of the table."""
    ratios = sorted(ratios)
    quarter = len(ratios) // 4
    gib, layers = peak_gib(name, sizes)
    speed = f"{statistics.median(ratios):.3f} [{ratios[quarter]:.3f}, {ratios[-1 - quarter]:.3f}]"
    cells = [name, layers, f"{sizes.tokens / statistics.median(times):,.0f}", speed, f"{gib:.1f}", *errors]
    return f"| {' | '.join(cells)} |"


def measure(sizes: Sizes, recipes: Sequence[str], **kwargs: int) -> None:
    times: dict[str, list[float]] = {"bf16": []}
    ratios: dict[str, list[float]] = {"bf16": [1.0]}
    for recipe in recipes:
        times[recipe], theirs = compare(recipe, sizes, **kwargs)
        times["bf16"] += theirs
        ratios[recipe] = [bf16 / fp8 for bf16, fp8 in zip(theirs, times[recipe], strict=True)]
        report(f"{recipe} against bf16", times[recipe], theirs)

    errors: dict[str, list[str]] = {name: [] for name in times}
    for outliers in (False, True):
        exact = gradients("fp32", sizes, outliers=outliers)
        for name, cells in errors.items():
            whole, worst, where = sqnr_db(gradients(name, sizes, outliers=outliers), exact)
            cells += [f"{whole:.1f}", f"{worst:.1f} (`{where.removesuffix('.weight')}`)"]
        del exact

    print(
        "\nThe error is the error of the blocks' gradient against fp32, from the same weights: SQNR in dB, of all"
        " weights and of the worst one.\n\n| | layers in fp8 | tokens/s | x as fast as bf16 | peak GiB | SQNR |"
        " worst weight | SQNR, outlier channels | worst weight |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name, cells in errors.items():
        print(row(name, times[name], ratios[name], sizes, cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="emulated: does it run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of `--tiny`; else it is cuda")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--blocks", type=int, default=Sizes().blocks)
    parser.add_argument("--batch", type=int, default=Sizes().batch)
    args = parser.parse_args()
    try:
        importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        print("fp8 against bf16: torchao is not installed (`pip install 'torchao>=0.18'`), nothing was measured.")
        return
    if not args.tiny and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        print("fp8 against bf16: there is no GPU with fp8 here (sm_89 or later), nothing was measured.")
        return
    sizes = TINY._replace(accelerator=args.device) if args.tiny else Sizes(blocks=args.blocks, batch=args.batch)
    start("Compiled training steps: fp8 against bf16, both AmpPrecision", torch.device(sizes.accelerator))
    describe(sizes)
    lengths = {"steps": 1, "blocks": 3, "warmup": 1} if args.tiny else {"steps": 5, "blocks": 11, "warmup": 10}
    measure(sizes, args.recipes, **lengths)


if __name__ == "__main__":
    main()
