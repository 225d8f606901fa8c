"""Row 24: modules that stay in fp32, and evaluation in another precision."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, FEATURES, Toy, assert_same, attributes, batches, evaluate, fit, quiet_trainer, weights
from support.averages import EMAWeightAveraging
from support.promises import DIFFERS, Plugins, promise
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice

EVALUATIONS = ["validate", "test", "predict"]


class Rotary(nn.Module):
    """Positional phases as people write them: with an explicit `.float()`, which autocast ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, positions: Tensor) -> Tensor:
        return (self.frequencies[:, None].float() @ positions[None, :].float()).mT


class Positions(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"rotary": Rotary()})
        self.distinct = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        phases = self.decoder["rotary"](torch.arange(4096.0, device=batch.device))
        self.distinct = len(phases[:, 0].unique())


@promise(24, stock="769 == 4096")
def test_rotary_positions_are_distinct(plugins: Plugins) -> None:
    module = Positions()
    plugin = AmpPrecision("bf16", fp32_modules=["decoder.rotary"]) if plugins.ours else plugins.bf16()
    quiet_trainer(plugins=[plugin]).validate(module, batches(1), verbose=False)
    assert module.distinct == 4096


class ByHand(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, enabled=False):
            hidden = self.net[0](batch)
        hidden = self.net[1](hidden)
        with torch.autocast(batch.device.type, enabled=False):
            out = self.net[2](hidden.float())
        return nn.functional.mse_loss(out, batch.sum(1, keepdim=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("rules", [["net.0", "net.2"], ["net.[02]"], [nn.Linear], ["net.2", nn.Linear]])
def test_training_equals_islands_by_hand(rules: list[Any], precision: str) -> None:
    reference = fit(ByHand, AmpPrecision(precision))
    ours = fit(Toy, AmpPrecision(precision, fp32_modules=rules))
    assert_same(ours, reference)
    with pytest.raises(AssertionError, match=DIFFERS):
        assert_same(fit(Toy, AmpPrecision(precision)), reference)
    assert attributes(ours.lightning_module) == attributes(Toy())


def test_all_layers_in_fp32_is_fp32() -> None:
    assert_same(fit(Toy, AmpPrecision("bf16", fp32_modules=["net"])), fit(Toy))


def test_averaged_weights_and_copies_in_training() -> None:
    """Averages copy the module before and during training; copies compute like the original, with their own weights."""
    copies: list[Any] = []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if not copies:
                copies.append((copy.deepcopy(module.net), weights(module.net)))

    plugin = AmpPrecision("bf16", fp32_modules=["net.*"])
    trainer = fit(Toy, plugin, callbacks=[Copy(), EMAWeightAveraging(decay=0.5)])
    copied, at_the_time = copies[0]
    assert_same(copied, at_the_time)
    x = torch.randn(4, FEATURES, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert copied(x).dtype == torch.float32
        assert trainer.lightning_module.net.to(DEVICE)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rule_that_matches_nothing(precision: str) -> None:
    module = Toy()
    with pytest.raises(ValueError, match="'net.7', which matches no module. Close to it are: 'net.[012]'"):
        fit(module, AmpPrecision(precision, fp32_modules=["net.7"]))
    assert all("forward" not in vars(m) for m in module.modules())


@pytest.mark.needs("whole autocast")
def test_bce_in_fp32_is_not_reported() -> None:
    class Loss(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.losses = nn.ModuleList([nn.BCELoss()])

        def loss(self, batch: Tensor) -> Tensor:
            return self.losses[0](torch.sigmoid(self.net(batch)), (batch.sum(1, keepdim=True) > 0).float())

    fit(Loss, AmpPrecision("bf16", fp32_modules=["losses"]))
    refused = pytest.raises(RuntimeError, match="unsafe to autocast") if DEVICE == "cuda" else contextlib.nullcontext()
    with pytest.warns(UserWarning, match="`nn.BCELoss` .`losses.0`"), refused:
        fit(Loss, AmpPrecision("bf16"))


class Evaluated(Toy):
    def evaluate(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", self.loss(batch))
        self.enabled = torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)
        return self.net(batch)

    validation_step = test_step = evaluate

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained = torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)
        return self.loss(batch)


@pytest.mark.parametrize("run", EVALUATIONS)
@promise(24, stock=DIFFERS)
def test_evaluation_in_fp32(plugins: Plugins, run: str) -> None:
    def results(plugin: Any) -> Any:
        torch.manual_seed(0)
        trainer, output = evaluate(run, Evaluated(), batches(3), plugins=[plugin])
        return [x.float() for x in output] if run == "predict" else trainer.callback_metrics

    plugin = AmpPrecision("fp16", eval_precision="fp32") if plugins.ours else plugins.fp16()
    torch.testing.assert_close(results(plugin), results(AmpPrecision("fp32")), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("train", "evaluate", "expected"),
    [
        ("fp16", "fp32", (torch.float16, None)),
        ("fp16", torch.bfloat16, (torch.float16, torch.bfloat16)),
        ("bf16", "16-mixed", (torch.bfloat16, torch.float16)),
        ("fp32", 16, (None, torch.float16)),
        ("auto", "32-true", (..., None)),
        ("fp16", "auto", (torch.float16, ...)),
        ("bf16", None, (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_spellings_and_switching_in_fit(train: Any, evaluate: Any, expected: tuple[Any, Any]) -> None:
    plugin, module = AmpPrecision(train, eval_precision=evaluate), Evaluated()
    quiet_trainer(plugins=[plugin], max_epochs=2).fit(module, batches(2), batches(2))
    picked = Choice.pick(torch.device(DEVICE))[0].dtype
    for (enabled, dtype), wanted in zip((module.trained, module.enabled), expected, strict=True):
        assert (dtype if enabled else torch.float32) == (picked if wanted is ... else wanted or torch.float32)
    assert plugin.dtype == (expected[0] or torch.float32) if expected[0] is not ... else True


def test_training_is_the_same_whatever_evaluates() -> None:
    runs: list[L.LightningModule] = []
    for eval_precision in (None, "fp32", "fp16"):
        torch.manual_seed(0)
        runs.append(Evaluated())
        trainer = quiet_trainer(plugins=[AmpPrecision("bf16", eval_precision=eval_precision)], val_check_interval=2)
        trainer.fit(runs[-1], batches(), batches(2))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_what_cannot_run_is_said_when_the_trainer_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.casting._precision_choice.runnable", lambda device: ["bf16", "fp32"])
    with pytest.raises(ValueError, match="cannot run eval_precision 'fp16'. It can run: 'bf16', 'fp32'"):
        quiet_trainer(plugins=[AmpPrecision("bf16", eval_precision="fp16")]).validate(Evaluated(), batches(1))
