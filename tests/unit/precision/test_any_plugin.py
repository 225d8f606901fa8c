"""Row 35: `scaled_grad` and `unscale_` under any plugin."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support import Manual, Toy, assert_same, fit, stock, weights
from support.promises import plain_sgd
from torch import Tensor

from lightning_amp import AmpPrecision
from lightning_amp.precision import scaled_grad, unscale_


class Penalty(Toy):
    """Adds a gradient penalty, by `grad` or by our `scaled_grad`."""

    def __init__(self, grad: Any = None) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=1e-3))
        self.grad = grad

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch = batch.clone().requires_grad_()
        score = self.net(batch)
        grad = self.grad or partial(scaled_grad, self.trainer)
        (gradient,) = grad(score.sum(), batch, create_graph=True)
        return score.float().mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: stock("bf16"),
        lambda: stock("fp16", init_scale=2.0**10),
        lambda: AmpPrecision("bf16"),
        lambda: AmpPrecision("fp32"),
    ],
    ids=["none", "stock bf16", "stock fp16", "ours bf16", "ours fp32"],
)
def test_without_our_loss_scaling_it_is_torchs(make: Any) -> None:
    assert_same(fit(Penalty, make()), fit(lambda: Penalty(torch.autograd.grad), make()))


class Adversarial(Toy):
    """Moves the batch along its own gradient, which a backward would leave multiplied by the loss scale."""

    def __init__(self, manual: bool) -> None:
        super().__init__(plain_sgd)
        self.automatic_optimization = not manual
        self.moved: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = batch.clone().requires_grad_()
        (gradient,) = scaled_grad(self.trainer, self.loss(x), x)
        self.moved.append(gradient.norm())
        loss = self.loss(batch + 0.5 * gradient)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return None


@pytest.mark.parametrize("manual", [False, True])
def test_gradients_of_inputs(manual: bool) -> None:
    """Row 49: adversarial training in automatic and manual optimization."""
    plugin = AmpPrecision("fp16", scaler=1024.0)
    ours, reference = (fit(lambda: Adversarial(manual), p).lightning_module for p in (plugin, None))
    assert plugin.num_skipped == 0
    assert_same(torch.stack(ours.moved), torch.stack(reference.moved), rtol=0.02, atol=0.0)
    assert_same(weights(ours), weights(reference), rtol=0.0, atol=0.01)


class LooksByHand(Manual):
    """Clips its gradients itself, with one line that works under any plugin."""

    def edit(self, optimizer: Any, batch_idx: int) -> None:
        unscale_(self.trainer, optimizer)


def test_lightnings_loss_scaling_is_refused() -> None:
    """Its plugin unscales in the step, where the scaler would refuse a second time."""
    with pytest.raises(RuntimeError, match=r"`unscale_` cannot unscale under `MixedPrecision`.*AmpPrecision\('fp16'\)"):
        fit(lambda: LooksByHand(plain_sgd), stock("fp16"))
