"""A training step on a shadow works on the shadow's parameters and optimizers, not on the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, Manual, Toy, assert_same, fit, weights
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Trace, reduces_fp32


def probe(module: Callable[[], L.LightningModule], look: Callable[[L.Trainer, TrainingPass, Any], None]) -> L.Trainer:
    """Run the first batch on a shadow before the real step, then stop."""

    class Probe(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
            twin = TrainingPass(trainer, module)
            twin.run(batch, batch_idx, context=trainer.precision_plugin.forward_context(), scale=4.0)
            look(trainer, twin, module)
            twin.close()

    return fit(module, AmpPrecision("bf16"), callbacks=[Probe()], max_steps=2)


class Gan(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 1)
        self.frozen: list[tuple[bool, bool]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        self.toggle_optimizer(optimizer)
        self.manual_backward((self.net(batch).float() + self.other(batch).float()).square().mean())
        self.frozen.append((self.net[0].weight.requires_grad, self.other.weight.requires_grad))
        optimizer.step(closure=lambda: self.frozen.append((True, False)))
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


def test_toggling_concerns_the_shadow() -> None:
    def look(trainer: L.Trainer, twin: TrainingPass, module: Gan) -> None:
        assert twin.module.frozen[-2:] == [(True, False)] * 2
        assert sorted(twin.gradients()) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
        assert all(p.requires_grad for p in (*module.parameters(), *twin.module.parameters()))
        real = {id(p) for p in module.parameters()}
        assert real.isdisjoint(id(p) for p in twin.module.parameters())
        assert len(module.frozen) == 2 * trainer.global_step

    assert probe(Gan, look).global_step == 2


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_overridden_backward_runs(is_watched: bool) -> None:
    """A backward of the user's own may enter a context, such as `loss_parallel`."""
    calls: list[dict[str, Any]] = []

    class Own(Toy):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs)
            super().backward(loss, *args, **kwargs)

    class Probe(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
            for scale in (1.0, 4.0):
                twin, before = TrainingPass(trainer, module), len(calls)
                trace = Trace(module, __file__) if is_watched else None
                twin.run(batch, batch_idx, context=trainer.precision_plugin.forward_context(), scale=scale, trace=trace)
                assert len(calls) == before + 1
                found.append(twin.gradients()["net.0.weight"].clone())
                twin.close()

    found: list[Tensor] = []
    fit(Own(), AmpPrecision("bf16"), callbacks=[Probe()], max_steps=1)
    assert_same(*([one] for one in found))


class ByHand(Manual):
    """Steps the optimizer inside Lightning's wrapper, or uses the scaler for everything."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, scaler = self.optimizers(), getattr(self.trainer.precision_plugin, "scaler", None)
        optimizer.zero_grad()
        if self.how == "inner":
            self.manual_backward(self.loss(batch))
            optimizer.optimizer.step()
            return
        if self.how == "twice":  # the second backward adds to gradients that are true already
            for _ in range(2):
                self.manual_backward(self.loss(batch) / 2)
                self.trainer.precision_plugin.unscale_(optimizer)  # type: ignore[attr-defined]
            optimizer.step()
            return
        assert scaler is not None
        first, (second,) = scaler.scale((self.loss(batch) / 2, [self.loss(batch) / 2]))
        (first + second).backward()
        scaler.unscale_(optimizer.optimizer)
        assert scaler.get_scale() == self.trainer.precision_plugin.scaler.get_scale()  # pyright: ignore
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "precision"), [("inner", "bf16"), ("inner", "fp32"), ("recipe", "fp16"), ("twice", "fp16")]
)
def test_a_step_by_hand_concerns_the_shadow(how: str, precision: str) -> None:
    """The stand-in of the optimizer has no real one inside, and the real scaler is not called."""
    passes: list[dict[str, Tensor]] = []

    class Probe(L.Callback):
        def on_train_batch_end(
            self, trainer: L.Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int
        ) -> None:
            twin = TrainingPass(trainer, module)
            before = weights(module)
            for scale in (1.0, 4.0):
                twin.run(batch, batch_idx, context=trainer.precision_plugin.forward_context(), scale=scale)
                passes.append(twin.gradients())
            assert_same(module, before)
            twin.close()

    runs = [
        fit(
            lambda: ByHand(how),
            AmpPrecision(precision, scaler=512.0 if precision == "fp16" else None),
            callbacks=probes,
        )
        for probes in ([], [Probe()])
    ]
    assert_same(*runs)
    assert [run.precision_plugin.num_steps for run in runs] == [0 if how == "inner" else 8] * 2
    assert len(passes) == 16
    for single, scaled in zip(passes[::2], passes[1::2], strict=True):
        assert sorted(single) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
        assert_same(single, scaled, rtol=1e-2, atol=1e-2)


def test_a_pass_in_fp32_has_a_backward_in_fp32() -> None:
    """TF32, and bfloat16 inside fp32 products, are off in this backward; the real backward has the user's setting."""
    reduced: dict[str, list[bool]] = {"step": [], "backward": []}

    class Looks(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            reduced["step"].append(reduces_fp32(DEVICE))
            loss = super().loss(batch)
            loss.register_hook(lambda _: reduced["backward"].append(reduces_fp32(DEVICE)))
            return loss

    class Probe(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Tensor, batch_idx: int) -> None:
            twin = TrainingPass(trainer, module, upcast=True)
            twin.run(batch, batch_idx, context=None)
            twin.close()

    torch.set_float32_matmul_precision("medium")
    try:
        fit(Looks, AmpPrecision("fp32"), callbacks=[Probe()], max_steps=2)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert reduced == {"step": [False, True] * 2, "backward": [False, True] * 2}
