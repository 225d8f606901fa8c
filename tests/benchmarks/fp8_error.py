"""Measure the error of one fp8 layer, in usual and in bad cases: `python -m tests.benchmarks.fp8_error`.

Prints a Markdown table for bf16 and the three recipes: the signal-to-noise ratio against fp32, in dB, of output, input
gradient and weight gradient. Each figure is the ratio of the median row, because over the whole tensor a few large rows
would hide the error of the others.

fp8 is emulated: the products of 8-bit values are exact and summed in float32. An H100 sums them with fewer bits where a
recipe has `use_fast_accum`; this table does not show that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from lightning_amp.casting import linears_in_fp8
from lightning_amp.numerics import fidelity, fidelity_sums
from tests.benchmarks._pairs import start

RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")
ROWS, WIDTH = 512, 512
Case = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Training:
    in_fp8 = True


def one_row(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """One token, and its gradient, is far larger than the others."""
    x[3] *= 1e6
    grad[3] *= 1e6
    return x, grad


def scattered(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that spread over many orders of magnitude."""
    return x, grad * torch.exp(4 * torch.randn(grad.shape))


def tiny(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients too small for torchao to scale up."""
    return x, grad * 1e-18


CASES: dict[str, Case] = {
    "normal values": lambda x, grad: (x, grad),
    "one row a million times as large as the others": one_row,
    "gradients over many orders of magnitude": scattered,
    "gradients of 1e-18": tiny,
}


def figures(case: Case, recipe: str | None) -> tuple[float, float, float]:
    """Return the SQNR in dB of the median row of output, input gradient and weight gradient; `None` means bf16."""
    from torchao.float8 import Float8LinearConfig

    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    x, grad = case(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))

    def run(autocast: bool) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            output = layer(inputs).float()
        return [output, *torch.autograd.grad(output, [inputs, layer.weight], grad)]

    exact = run(autocast=False)
    if recipe is not None:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        linears_in_fp8(layer, {""}, config, "cpu", Training()).__enter__()
    first, second, third = (_of_a_row(a, b) for a, b in zip(exact, run(autocast=True), strict=True))
    return first, second, third


def _of_a_row(exact: Tensor, values: Tensor) -> float:
    return float(torch.stack([fidelity(fidelity_sums(a, b))[0] for a, b in zip(exact, values, strict=True)]).median())


def main() -> None:
    if find_spec("torchao") is None:
        print("This needs torchao 0.18: `pip install torchao`.")
        return
    start("What fp8 costs in accuracy, emulated")
    print("\n| values in the layer | precision or recipe | output | input gradient | weight gradient |")
    print("|---|---|---|---|---|")
    for name, case in CASES.items():
        for recipe in (None, *RECIPES):
            cells = " | ".join(f"{value:.1f} dB" for value in figures(case, recipe))
            print(f"| {name} | {f'fp8, {recipe}' if recipe else 'bf16'} | {cells} |")


if __name__ == "__main__":
    main()
