"""The watch sees functions that clip scaled gradients, and inaccurate derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.shadow._step_watch import StepWatch, inaccurate_derivatives

SCALE = 64.0


def scaled_backward(layer: nn.Module, x: Tensor) -> None:
    (layer(x).sum() * SCALE).backward()


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("clip_grad_norm_", lambda p: nn.utils.clip_grad_norm_(p, 1e-3)),
        ("clip_grad_norm_", lambda p: nn.utils.clip_grad_norm_(p, 1e-3, norm_type=float("inf"), foreach=False)),
        ("clip_grad_value_", lambda p: nn.utils.clip_grad_value_(p, 1e-3)),
        ("clip_grad_value_", lambda p: nn.utils.clip_grad_value_(p, 1e-3, foreach=False)),
    ],
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping(name: str, clip: object, unscaled: bool) -> None:
    layer, x = nn.Linear(4, 2), torch.ones(3, 4)
    with StepWatch(layer, SCALE) as watch:
        scaled_backward(layer, x)
        if unscaled:
            watch.unscaled = set(layer.parameters())
        clip(list(layer.parameters()))  # type: ignore[operator]
    assert list(watch.clippings.values()) == ([] if unscaled else [name])
    assert all("test_step_watch.py" in str(line) for line in watch.clippings)


def derivatives(dtype: torch.dtype, factor: float) -> StepWatch:
    x = torch.full((8,), 1.0, dtype=dtype, requires_grad=True)
    with StepWatch(nn.Linear(1, 1)) as watch:
        torch.autograd.grad((x * factor).square().sum(), x, create_graph=True)
        torch.autograd.grad(x.sum(), x)
    return watch


@pytest.mark.parametrize(("factor", "lost"), [(1.0, False), (1e-4, True), (1e-6, True)])
def test_derivatives_that_fp16_does_not_hold(factor: float, lost: bool) -> None:
    true, half = derivatives(torch.float32, factor), derivatives(torch.float16, factor)
    assert len(half.derivatives) == 1  # the one that creates a graph
    found = inaccurate_derivatives(true, half)
    assert bool(found) == lost
    if lost:
        assert found[0].zero == 1
        assert "create_graph=True" in found[0].line
