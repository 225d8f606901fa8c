"""Whether unscale, clip and step may run as one pass."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support import Toy, fit, quiet_trainer
from support.promises import fused_adamw, plain_sgd

from lightning_amp import AmpPrecision
from lightning_amp.precision._clipping import FoldPlan


class ComesLate(L.Callback):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.callbacks.append(SeesGradients(self.calls))


class SeesGradients(L.Callback):
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)


@pytest.mark.parametrize("optimizer", [plain_sgd, fused_adamw])
def test_callbacks_that_come_late_are_called(optimizer: Any) -> None:
    late = ComesLate()
    fit(lambda: Toy(optimizer), AmpPrecision("fp32"), callbacks=[late])
    assert late.calls == [4, 4, 5, 5, 6, 6, 7, 7]


class Hooked(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class ClipsItself(Toy):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class Looks(L.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None: ...


def plan(module: L.LightningModule, own_norm: bool = False, **trainer: Any) -> FoldPlan:
    module.trainer = quiet_trainer(**trainer)
    return FoldPlan(module, own_norm)


def manual() -> Toy:
    module = Toy()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("module", "trainer", "expected"),
    [
        (Toy, {}, (True, None)),
        (Toy, {"callbacks": [L.Callback()]}, (True, None)),
        (Toy, {"callbacks": [Looks()]}, (False, None)),
        (Toy, {"callbacks": [Looks()], "gradient_clip_val": 0.5}, (False, None)),
        (Hooked, {}, (False, None)),
        (ClipsItself, {}, (False, None)),
        (Toy, {"gradient_clip_val": 0.5}, (True, 0.5)),
        (Toy, {"gradient_clip_val": 0}, (True, None)),
        (Toy, {"gradient_clip_val": 2, "gradient_clip_algorithm": "norm"}, (True, 2.0)),
        (Toy, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, (False, 0.5)),
        (Toy, {"gradient_clip_val": 0.5, "own_norm": True}, (False, 0.5)),
        (Toy, {"own_norm": True}, (True, None)),
        (manual, {}, (True, None)),
    ],
)
def test_who_looks_and_who_clips_decide(module: Any, trainer: dict[str, Any], expected: Any) -> None:
    assert plan(module(), **trainer).current().fold() == expected


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward"])
def test_who_sees_the_backward(hook: str) -> None:
    for kind in (Toy, L.Callback):
        hooked: Any = type("Hooked", (kind,), {hook: lambda *args: None})()
        module, callbacks = (hooked, []) if kind is Toy else (Toy(), [hooked])
        looked = plan(module, callbacks=callbacks)
        assert looked.somebody_sees_backward
        assert looked.fold() == (True, None)  # it does not look at what the step sees
    assert not plan(Toy()).somebody_sees_backward


def test_a_hook_on_the_instance_counts() -> None:
    module = Toy()
    module.on_before_optimizer_step = lambda optimizer: None
    assert plan(module).fold() == (False, None)


def test_callbacks_that_come_or_go_are_seen() -> None:
    module = Toy()
    looked = plan(module)
    assert looked.current().fold() == (True, None)
    module.trainer.callbacks.append(late := Looks())
    assert looked.current().fold() == (False, None)
    module.trainer.callbacks.remove(late)
    assert looked.current().fold() == (True, None)
