"""Row 39, and the one line at the start of a fit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, Toy, assert_same, batches, fit, quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor
from lightning_amp.casting import Choice


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let `"auto"` pick this precision."""
    monkeypatch.setattr(Choice, "pick", lambda *_: (Choice.of(name), f"the machine likes {name}"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that the plugin has logged since the last call."""
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("lightning_amp:")]
    caplog.clear()
    return lines


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def scaler() -> DynamicLossScaler:
    return DynamicLossScaler(2.0**12, growth_interval=3)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
@pytest.mark.parametrize("given", [scaler, lambda: torch.amp.GradScaler(DEVICE), lambda: 128.0])
def test_auto_leaves_a_scaler_unused(
    name: str, given: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    machine(monkeypatch, name)
    plugin = AmpPrecision("auto", scaler=given())
    trainer = fit(Toy, plugin)
    (line,) = said(caplog)
    assert line.startswith(f"lightning_amp: precision 'auto' is '{name}' here (the machine likes {name}): {name}")
    assert "`scaler` is left unused" in line
    assert plugin.scaler is None
    assert_same(trainer, fit(Toy, AmpPrecision(name)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["AmpPrecision"]["scaler"] is None
    assert "MixedPrecision" not in saved


def test_fp32_leaves_a_scaler_unused(caplog: pytest.LogCaptureFixture) -> None:
    for precision in ("fp32", 32, "32-true"):
        caplog.clear()
        plugin = AmpPrecision(precision, scaler=scaler())
        assert plugin.scaler is None
        trainer = fit(Toy, plugin)
        (line,) = said(caplog)
        assert "`scaler` is left unused" in line
        assert plugin.last_step.scale == 1.0
        assert_same(trainer, fit(Toy))


@pytest.mark.parametrize("how", [lambda p: p, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_the_same_plugin_on_another_machine(
    how: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = AmpPrecision("auto", scaler=scaler())
    for name in ("fp32", "fp16", "bf16", "fp16"):
        machine(monkeypatch, name)
        plugin = how(plugin)
        caplog.clear()
        trainer = fit(Toy, plugin)
        (line,) = said(caplog)
        assert ("`scaler` is left unused" in line) == (name != "fp16")
        assert (plugin.scaler is None) == (name != "fp16")
        assert_same(trainer, fit(Toy, AmpPrecision(name, scaler=scaler() if name == "fp16" else None)))
        if name == "fp16":
            assert plugin.scaler.get_growth_interval() == 3
            assert plugin.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize("began_in", ["fp16", "bf16", "fp32"])
def test_a_run_stays_in_the_precision_of_its_checkpoint_on_other_machines(
    began_in: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    elsewhere = "fp32" if began_in == "bf16" else "bf16"
    for epochs, name in enumerate((began_in, elsewhere, "fp32", began_in), start=1):
        machine(monkeypatch, name)
        trainers: list[Any] = []
        lines: list[str] = []
        for precision in (began_in, "auto"):
            path = tmp_path / f"{precision}.ckpt"
            plugin = AmpPrecision(precision, scaler=scaler() if began_in == "fp16" else None)
            said(caplog)
            trainers.append(fit(Toy, plugin, max_epochs=epochs, ckpt_path=path if epochs > 1 else None))
            trainers[-1].save_checkpoint(path)
            lines = said(caplog)
            assert plugin.last_step is not None
            assert plugin.last_step.precision == began_in
        assert_same(*trainers)
        assert len(lines) == (1 if name == began_in else 2)
        if name != began_in:
            here = f"'auto' is '{name}' here"
            assert f"{here} (the machine likes {name}), unless the checkpoint says otherwise" in lines[0]
            assert f"goes on in '{began_in}', although {here}" in lines[1]
            assert "unused" not in lines[0]


class Heads(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize(
    ("precision", "options", "rest"),
    [
        ("fp16", {}, "loss scale 2**16 (dynamic); non-finite steps are skipped"),
        (
            "fp16",
            {"scaler": 1024.0, "fp32_modules": [nn.Linear]},
            "loss scale 1024 (static), 2 modules in fp32; non-finite steps are skipped",
        ),
        (
            "fp16",
            {"scaler": torch.amp.GradScaler(DEVICE, init_scale=2.0**11), "fp32_modules": ["net.0"]},
            "loss scale 2**11 (GradScaler), 1 module in fp32; non-finite steps are skipped",
        ),
        (
            "fp16",
            {"scaler": torch.amp.GradScaler(DEVICE, enabled=False), "skip_nonfinite": False},
            "no loss scale (GradScaler, disabled); non-finite steps are taken",
        ),
        ("bf16", {"eval_precision": "fp32"}, "evaluation in fp32; non-finite steps are skipped"),
        ("fp32", {"skip_nonfinite": False}, "no autocast; non-finite steps are taken"),
    ],
)
def test_one_line_says_what_is_on(
    precision: str, options: dict[str, Any], rest: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = f"{precision}{' autocast' if precision != 'fp32' else ''} on {DEVICE}, {rest}"
    trainer = quiet_trainer(plugins=[AmpPrecision(precision, **options)])
    trainer.fit(Heads(), batches(2), batches(1))
    assert said(caplog) == [f"lightning_amp: {line}."]
    trainer.validate(trainer.lightning_module, batches(1), verbose=False)
    assert said(caplog) == []


def test_a_resumed_run_does_not_claim_a_scale(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fit(Toy, AmpPrecision("fp16")).save_checkpoint(tmp_path / "a.ckpt")
    said(caplog)
    fit(Toy, AmpPrecision("fp16"), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert ", loss scale from the checkpoint (dynamic);" in said(caplog)[0]


def test_auto_says_so_in_evaluation_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine(monkeypatch, "bf16")
    quiet_trainer(plugins=[AmpPrecision("auto", scaler=64.0)]).validate(Heads(), batches(1), verbose=False)
    assert said(caplog) == [
        f"lightning_amp: precision 'auto' is 'bf16' here (the machine likes bf16): bf16 autocast on {DEVICE}."
    ]


def test_the_monitor_reads_a_run_whose_scaler_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "bf16")
    monitor = ScaleMonitor()
    fit(Toy, AmpPrecision("auto", scaler=64.0), callbacks=[monitor])
    assert monitor.history.summary() == "0 of 8 steps skipped; scale 1 -> 1"
