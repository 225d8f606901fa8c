"""Whether fp8 with a scale for each row is more accurate than with one for the tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, overall
from benchmarks.claims._models import text, text_loss
from benchmarks.claims._sources import TORCHAO
from benchmarks.claims._training import trained

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_PRODUCTS = ("output", "input gradient", "weight gradient")


def run(setting: Setting) -> Outcome:
    """Emulate the three products of each linear layer of trained GPTs with torchao's two recipes."""
    gains = [_gains_db(setting, seed) for seed in setting.seeds]
    found = [Interval.of(gain[k] for gain in gains) for k in range(3)]
    figure = ", ".join(f"{name} {gain.mean:+.1f} dB" for name, gain in zip(_PRODUCTS, found, strict=True))
    details = "Intervals: " + ", ".join(f"{low:.1f} to {high:.1f}" for _, low, high in found) + "."
    return Outcome(overall(gain.within(1.0, 1e9) for gain in found), figure, details)


def _gains_db(setting: Setting, seed: int) -> list[float]:
    """Return how much the SQNR of each product gains by rows, as the mean over the layers, in dB."""
    net = trained(setting, "fp32", seed).net
    inputs: dict[nn.Module, Tensor] = {}
    gains: list[list[float]] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[layer] = args[0].detach().flatten(0, -2)
        output.register_hook(lambda grad: gains.append(_of_layer(inputs[layer], grad.flatten(0, -2), layer)))

    hooks = [layer.register_forward_hook(keep) for layer in net.modules() if isinstance(layer, nn.Linear)]
    text_loss(net, text(8, 25, seed).to(setting.device)).backward()
    for hook in hooks:
        hook.remove()
    return [sum(values) / len(values) for values in zip(*gains, strict=True)]


def _of_layer(x: Tensor, grad: Tensor, layer: nn.Module) -> list[float]:
    weight: Tensor = layer.get_parameter("weight").detach()
    pairs = ((x, weight.T), (grad, weight), (grad.T, x))
    return [_sqnr_db(a, b, _by_row) - _sqnr_db(a, b, _by_tensor(k)) for k, (a, b) in enumerate(pairs)]


def _sqnr_db(a: Tensor, b: Tensor, rounded: Callable[[Tensor, int], Tensor]) -> float:
    exact = a.double() @ b.double()
    error = rounded(a, 1).double() @ rounded(b, 0).double() - exact
    return float(10 * (exact.square().sum() / error.square().sum()).log10())


def _by_row(values: Tensor, dim: int) -> Tensor:
    """Round to e4m3 with a power of two for each row of the left factor and each column of the right one."""
    scale = torch.exp2((448 / values.abs().amax(dim, keepdim=True).clamp(min=1e-12)).log2().floor())
    return (values * scale).to(_E4M3).float() / scale


def _by_tensor(product: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that rounds with one scale: to e4m3, and gradients, the left factor, to e5m2."""

    def rounded(values: Tensor, dim: int) -> Tensor:
        is_gradient = product > 0 and dim == 1
        scale = (57344 if is_gradient else 448) / values.abs().max().clamp(min=1e-12)
        return (values * scale).to(_E5M2 if is_gradient else _E4M3).float() / scale

    return rounded


CLAIM = Claim(
    "Rowwise fp8 is more accurate",
    TORCHAO,
    "Emulated for the linear layers of trained GPTs: SQNR of rowwise minus tensorwise; at least 1 dB.",
    run,
)
