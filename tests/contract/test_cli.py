"""Configure the plugin and its scaler from a LightningCLI YAML file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from support import Toy, batches
from support.fp8 import Deep, float8, needs_torchao
from torch import nn

from lightning_amp import AmpPrecision, ScaleMonitor
from lightning_amp.casting import Choice

CONFIG = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_amp.AmpPrecision
      init_args:
        precision: {precision}
{scaler}
  callbacks:
    - class_path: lightning_amp.ScaleMonitor
      init_args:
        log_every_n_steps: 2
"""
SCALER = """
        scaler:
          class_path: lightning_amp.DynamicLossScaler
          init_args:
            init_scale: 1024.0
            growth_interval: 3
"""


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse warns about how Lightning calls it


class CliToy(Toy):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> object:
        return batches()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., L.Trainer]:
    """Return a function that fits by a LightningCLI, with a YAML or with arguments."""
    monkeypatch.chdir(tmp_path)

    def fit(*arguments: str, module: type[Toy] = CliToy, precision: str = "", settings: str = "") -> L.Trainer:
        Path("config.yaml").write_text(CONFIG.format(precision=precision, scaler=settings.strip("\n")))
        monkeypatch.setattr(sys, "argv", ["train.py", "fit", *(arguments or ("--config", "config.yaml"))])
        return LightningCLI(module, save_config_callback=None).trainer

    return fit


@pytest.mark.parametrize(
    ("precision", "scaler"), [("bf16-mixed", ""), ("fp16", SCALER), ("fp16", "        scaler: 256.0"), ("16", "")]
)
def test_from_yaml(precision: str, scaler: str, run: Any) -> None:
    trainer = run(precision=precision, settings=scaler)
    plugin = trainer.precision_plugin
    assert type(plugin) is AmpPrecision
    assert plugin.num_steps + plugin.num_skipped == 8
    assert plugin.precision == {"bf16-mixed": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed"}[precision]
    if scaler:
        assert plugin.last_step.scale in {1024.0, 2048.0, 4096.0, 256.0, 512.0}
    assert any(isinstance(c, ScaleMonitor) and c.history.num_attempted == 8 for c in trainer.callbacks)


@pytest.mark.parametrize("machine", ["bf16", "fp16", "fp32"])
def test_one_yaml_for_all_machines(machine: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 39."""
    monkeypatch.setattr(Choice, "pick", lambda *_: (Choice.of(machine), "this test says so"))
    plugin = run(precision="auto", settings=SCALER).precision_plugin
    assert (plugin.scaler is not None) == (machine == "fp16")
    assert plugin.num_steps + plugin.num_skipped == 8
    assert plugin.last_step.scale in ({1024.0, 2048.0, 4096.0} if machine == "fp16" else {1.0})


@pytest.mark.parametrize(
    ("rules", "expected", "evaluate"),
    [
        ('["net.0", "*.2"]', ("net.0", "*.2"), "fp32"),
        ("[torch.nn.Linear, net.1]", (nn.Linear, "net.1"), "32-true"),
        ("[]", (), "16"),
        ("[]", (), "auto"),
        ("[]", (), "null"),
    ],
)
@pytest.mark.few(2)
def test_fp32_modules_and_eval_precision_from_yaml(rules: str, expected: Any, evaluate: str, run: Any) -> None:
    settings = f"        fp32_modules: {rules}\n        eval_precision: {evaluate}"
    plugin = run(precision="bf16", settings=settings).precision_plugin
    assert plugin.fp32_modules == expected
    assert plugin.num_steps == 8
    assert repr(plugin).startswith("AmpPrecision('bf16'")
    assert [f"{name}=" in repr(plugin) for name in ("fp32_modules", "eval_precision")] == [
        expected != (),
        evaluate != "null",
    ]


QUIET = [
    "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false",
    "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--trainer.plugins", "lightning_amp.AmpPrecision",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:No seed found")  # unless an earlier test has set one
@pytest.mark.parametrize(
    ("spelling", "precision"),
    [("16", "16-mixed"), ("torch.bfloat16", "bf16-mixed"), ("float16", "16-mixed"), ("32", "32-true")],
)
def test_from_the_command_line(spelling: str, precision: str, run: Any) -> None:
    arguments = ["--trainer.plugins.precision", spelling, "--trainer.plugins.eval_precision", spelling]
    plugin = run(*QUIET, *arguments).precision_plugin
    assert type(plugin) is AmpPrecision
    assert plugin.precision == precision
    assert plugin.num_steps + plugin.num_skipped == 8


FP8 = """
        fp8_recipe:
          class_path: torchao.float8.Float8LinearConfig
          init_args:
            emulate: true
"""


class DeepCliToy(Toy):
    def __init__(self) -> None:
        super().__init__(net=Deep())

    def train_dataloader(self) -> object:
        return batches(2)


@needs_torchao
@pytest.mark.filterwarnings("ignore:lightning_amp. fp8 is emulated")
def test_fp8_from_yaml(run: Any) -> None:
    float8()
    plugin = run(module=DeepCliToy, precision="fp8", settings=FP8).precision_plugin
    assert list(plugin.fp8_layers.values()).count(None) == 4
