"""Measure the error of a gradient penalty's gradients in half precision, at small and large loss scales.

`python -m tests.benchmarks.gradient_penalty` prints the table of `docs/guide/training.md`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_amp import DynamicLossScaler
from lightning_amp.scaling import DerivativeScale

LOSS_SCALES = (1.0, 2.0**10, 2.0**16, 2.0**24)


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
    return nn.Sequential(nn.Linear(256, 128), nn.Tanh(), *hidden, nn.Linear(128, 1))


def weight_gradients(dtype: torch.dtype, loss_scale: float, derivative_scale: bool = True) -> Tensor:
    """Return all gradients in one vector, unscaled."""
    net = critic()
    batch = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast(
        "cpu", dtype=torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32
    ):
        score = net(batch)
    scaler = DynamicLossScaler(loss_scale) if dtype == torch.float16 else None
    if derivative_scale or scaler is None:
        (gradient,) = DerivativeScale().grad(scaler, score.sum(), batch, create_graph=True)
    else:
        (gradient,) = torch.autograd.grad(score.sum() * loss_scale, batch, create_graph=True)
        gradient = gradient.float() / loss_scale
    penalty = 10 * (gradient.float().norm(dim=1) - 1).pow(2).mean()
    (penalty * (1.0 if scaler is None else loss_scale)).backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return flat if scaler is None else flat / loss_scale


def main() -> None:
    true = weight_gradients(torch.float32, 1.0)
    error = lambda gradients: float((gradients - true).norm() / true.norm())  # noqa: E731
    print("| loss scale | fp16, `scaled_grad` | fp16, `autograd.grad` times the loss scale | bf16 |")
    print("|---|---|---|---|")
    bf16 = error(weight_gradients(torch.bfloat16, 1.0))
    for scale in LOSS_SCALES:
        ours, before = (error(weight_gradients(torch.float16, scale, own)) for own in (True, False))
        print(f"| {scale:,.0f} | {ours:.1e} | {before:.1e} | {bf16:.1e} |")


if __name__ == "__main__":
    main()
