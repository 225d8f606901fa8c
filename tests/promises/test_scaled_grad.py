"""Rows 15 and 35: derivatives inside the loss are right at every loss scale."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, all_of_ours, assert_as_fp32, assert_same, batches, fit, scaled_fp32
from support.promises import Plugins, promise
from torch import Tensor

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.precision import scaled_grad

SCALES = [1.0, 2.0**10, 2.0**16, 2.0**24]


class Penalty(Toy):
    """The recipe of the guide; `factor` makes the score, and so its derivative, larger or smaller."""

    def __init__(self, factor: float = 1.0, lr: float = 1e-3) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=lr))
        self.factor = factor
        self.gradients: list[Tensor] = []
        self.weight_gradients: list[Tensor] = []

    def score(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch = batch.clone().requires_grad_()
        score = self.score(batch) * self.factor
        (gradient,) = scaled_grad(self.trainer, score.sum(), batch, create_graph=True)
        self.gradients.append(gradient.detach())
        return score.float().mean() + 10 * (gradient.norm(dim=1) / self.factor - 1).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.weight_gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))  # pyright: ignore


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("scale", SCALES)
def test_the_guides_recipe(scale: float) -> None:
    """The weights do not move, so that each batch can be compared, skipped or not."""
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(scale))
    module = fit(lambda: Penalty(lr=0.0), plugin, batches(24)).lightning_module
    reference = fit(lambda: Penalty(lr=0.0), None, batches(24)).lightning_module
    for mine, true in zip(module.gradients, reference.gradients, strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, true) < 2e-3
    taken = [
        (a, b) for a, b in zip(module.weight_gradients, reference.weight_gradients, strict=True) if a.isfinite().all()
    ]
    # at too large a scale the weights' gradients overflow, and the step is skipped
    assert len(taken) == plugin.num_steps >= 12
    for mine, true in taken:
        assert error(mine, true) < 5e-3


def test_with_defaults() -> None:
    fit(Penalty, plugin := AmpPrecision("fp16"), batches(16))
    assert plugin.num_skipped <= 4
    assert plugin.last_step is not None
    assert not plugin.last_step.skipped


def test_a_growing_scale_does_not_end_the_run() -> None:
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(growth_interval=1))
    fit(Penalty, plugin, batches(160))
    assert plugin.num_skipped <= 90  # the scale grows after each clean step, into the next overflow


@pytest.mark.parametrize("kind", ["static", "torch's"])
def test_other_scalers(kind: str) -> None:
    scaler = 2.0**13 if kind == "static" else torch.amp.GradScaler("cpu")
    fit(Penalty, plugin := AmpPrecision("fp16", scaler=scaler), batches(16))
    assert plugin.num_skipped <= 4


@pytest.mark.parametrize("scale", [2.0**10, 2.0**16])
def test_a_derivative_that_overflows_lowers_its_own_scale(scale: float) -> None:
    """The loss is then infinite, and a lower loss scale could not help."""
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(scale))
    module = fit(lambda: Penalty(factor=2.0**9, lr=0.0), plugin, batches(32)).lightning_module
    reference = fit(lambda: Penalty(factor=2.0**9, lr=0.0), None, batches(32)).lightning_module
    assert plugin.num_skipped <= 16
    assert plugin.last_step is not None
    assert not plugin.last_step.skipped
    assert error(module.gradients[-1], reference.gradients[-1]) < 5e-3


@pytest.mark.parametrize("scale", SCALES)
@promise(15, stock="assert")
def test_tiny_derivatives(plugins: Plugins, scale: float) -> None:
    """The derivative is about 1e-9; the smallest number of float16 is 6e-8."""

    class Tiny(Penalty):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            batch = batch.clone().requires_grad_()
            score = self.net(batch)
            (gradient,) = scaled_grad(self.trainer, score.float().mean() * 1e-7, batch, retain_graph=True)
            self.gradients.append(gradient)
            return score.float().mean()

    ours = AmpPrecision("fp16", scaler=DynamicLossScaler.static(scale))
    plugin = ours if plugins.ours else plugins.fp16(scale)
    module = fit(lambda: Tiny(lr=0.0), plugin, batches(16)).lightning_module
    reference = fit(lambda: Tiny(lr=0.0), None, batches(16)).lightning_module
    errors = [error(a, b) for a, b in zip(module.gradients, reference.gradients, strict=True)]
    assert max(errors) < 0.1
    if scale >= 2.0**16:  # the derivative's scale may grow as high
        assert errors[-1] < 5e-3


def test_a_bad_batch_does_not_lower_the_scale_of_derivatives() -> None:
    class Bad(Penalty):
        def score(self, batch: Tensor) -> Tensor:
            return super().score(batch) * (torch.nan if len(self.gradients) % 2 else 1.0)

    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0))
    fit(Bad, plugin, batches(16))
    assert plugin.state_dict()["derivative_scale"][0] == 2.0**10


def test_by_powers_of_two_it_is_fp32() -> None:
    assert_as_fp32(Penalty, scaled_fp32(init_scale=2.0**16))


def test_other_dtypes_and_arguments() -> None:
    seen: dict[str, Any] = {}

    class Arguments(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            double = batch.double().requires_grad_()
            unused = torch.ones(1, requires_grad=True, device=batch.device)
            outputs = self.net(double.float())
            grads = scaled_grad(
                self.trainer,
                [outputs, outputs.float() * 2],
                [double, unused],
                grad_outputs=[torch.ones_like(outputs), torch.ones(len(batch), 1, device=batch.device)],
                allow_unused=True,
                retain_graph=True,
            )
            (true,) = torch.autograd.grad(outputs.float().sum() * 3, double, retain_graph=True)
            seen.update(grads=grads, true=true)
            return outputs.float().mean()

    fit(Arguments, AmpPrecision("fp16"), batches(1))
    assert seen["grads"][1] is None
    assert seen["grads"][0].dtype == torch.float64
    assert error(seen["grads"][0], seen["true"]) < 5e-3


# -- nobody else notices ---------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 2.0**9])
def test_callbacks_that_run_steps_again_change_nothing(factor: float) -> None:
    class Validated(Penalty):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            with torch.enable_grad():
                batch = batch.clone().requires_grad_()
                (gradient,) = scaled_grad(self.trainer, self.score(batch).sum() * self.factor, batch)
            self.log("norm", gradient.norm())

        def val_dataloader(self) -> Any:
            return batches(2)

    def run(*callbacks: L.Callback) -> tuple[L.Trainer, Any]:
        plugin = AmpPrecision("fp16")
        trainer = fit(lambda: Validated(factor), plugin, inference_mode=False, callbacks=list(callbacks))
        return trainer, plugin.state_dict()

    (watched, state), (alone, state_alone) = run(*all_of_ours(every_n_steps=1)), run()
    assert_same(watched, alone)
    assert state == state_alone


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Any) -> None:
    def run(max_epochs: int, ckpt_path: Any = None) -> tuple[L.Trainer, AmpPrecision]:
        plugin = AmpPrecision("fp16")
        return fit(lambda: Penalty(2.0**9), plugin, max_epochs=max_epochs, ckpt_path=ckpt_path), plugin

    half, plugin = run(1)
    state = plugin.state_dict()["derivative_scale"]
    assert state[0] < 2.0**10
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    (resumed, after), (whole, expected) = run(2, tmp_path / "half.ckpt"), run(2)
    assert_same(resumed, whole)
    assert after.state_dict() == expected.state_dict()


@pytest.mark.parametrize("bad", [[0.0, 0.0], [float("nan"), 0.0], [1024.0], "x"])
def test_a_damaged_entry_is_named(bad: Any) -> None:
    fit(Penalty, plugin := AmpPrecision("fp16"), batches(2))
    with pytest.raises(ValueError, match="derivative_scale"):
        plugin.load_state_dict(plugin.state_dict() | {"derivative_scale": bad})
