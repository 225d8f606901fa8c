"""Row 39, and the one line at the start of a fit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DEVICE, Toy, assert_same, batches, fit, quiet_trainer, stock
from support.approved import assert_approved
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision
from lightning_amp.casting import Choice
from lightning_amp.precision import _first_line


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


class Heads(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16", {}),
    "fixed scale, layers in fp32": ("fp16", {"scaler": 1024.0, "fp32_modules": [nn.Linear]}),
    "settings of torch's scaler": (
        "fp16", {"scaler": torch.amp.GradScaler(DEVICE, init_scale=2.0**11), "fp32_modules": ["net.0"]}
    ),
    "no scaling, no skips": ("fp16", {"scaler": torch.amp.GradScaler(DEVICE, enabled=False), "skip_nonfinite": False}),
    "bf16, evaluation in fp32": ("bf16", {"eval_precision": "fp32"}),
    "fp32": ("fp32", {"skip_nonfinite": False}),
}  # fmt: skip


def test_one_line_says_what_is_on(caplog: pytest.LogCaptureFixture) -> None:
    lines = {}
    for case, (precision, options) in LINES.items():
        trainer = quiet_trainer(plugins=[AmpPrecision(precision, **options)])
        trainer.fit(Heads(), batches(2), batches(1))
        (lines[case],) = said(caplog)
        trainer.validate(trainer.lightning_module, batches(1), verbose=False)
        assert said(caplog) == []
    assert_approved(
        "first_line",
        {
            case: line.replace(f"on {DEVICE},", "on cpu,").replace(" (emulated, which is slow)", "")
            for case, line in lines.items()
        },
    )


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("fp16", "fp16", "lightning_amp: resumed: the loss scale is 2**12."),
        (
            "bf16",
            "fp16",
            "lightning_amp: resumed: the checkpoint was written in 'bf16', and training goes on in 'fp16'; the loss"
            " scale is 2**16, since the checkpoint has none.",
        ),
        (
            "fp16",
            "fp32",
            "lightning_amp: resumed: the checkpoint was written in 'fp16', and training goes on in 'fp32'.",
        ),
        ("stock", "fp16", "lightning_amp: resumed: the loss scale is 1024."),
        ("bf16", "bf16", None),
    ],
)
@pytest.mark.parametrize("fabric", [False, True])
def test_a_resumed_run_says_what_it_has(
    before: str, now: str, expected: str | None, fabric: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The checkpoint is loaded after the first line, which then does not state a scale."""
    first: Any = stock("fp16", init_scale=2.0**10) if before == "stock" else AmpPrecision(before)
    if before == "fp16":
        first = AmpPrecision(before, scaler=DynamicLossScaler(2.0**12))
    trainer = fit(Toy, first)
    said(caplog)
    if fabric:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
        FabricAmpPrecision(now).load_state_dict(saved.get("AmpPrecision") or saved["MixedPrecision"])
        lines = said(caplog)
    else:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        fit(Toy, AmpPrecision(now), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
        line, *lines = said(caplog)
        assert ("loss scale (dynamic)" in line) == (now == "fp16")
        assert "2**" not in line
    assert lines == ([] if expected is None else [expected])


@pytest.mark.parametrize("has", [[], ["avx512_bf16"]])
def test_a_precision_that_the_cpu_emulates_is_called_so(has: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_first_line, "cpu_has", lambda name: has)
    assert ("emulated" in _first_line.precision_on(Choice.of("bf16"), "cpu", "")) == (not has)
