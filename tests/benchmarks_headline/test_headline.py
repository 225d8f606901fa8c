"""One run measures what its record says; records survive a torn line; the page says what the records say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks._machine import RESULTS, Machine
from benchmarks.headline.__main__ import main
from benchmarks.headline._one_run import measure
from benchmarks.headline._page import page
from benchmarks.headline._plan import Run, plan
from benchmarks.headline._records import Record, append, read
from benchmarks.headline.models import MODELS, Batch, Model, Size, Workload

MACHINE = Machine("a device", ("torch 2.11.0",), tiny=True)


def make_toy(size: Size, tiny: bool) -> Workload:
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    batch = {"x": torch.rand(size.batch, 32), "y": torch.rand(size.batch, 32)}
    return Workload(net, toy_loss, batch, [net[1]], "toy 1")


def toy_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch["x"]).float(), batch["y"])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a toy into the list of models under the name of ResNet-50."""
    usual = MODELS["resnet50"]
    known = {name: getattr(usual, name) for name in ("title", "sizes", "unit", "why_sizes", "num_parameters")}
    model = Model(**{**known, "name": "resnet50", "make": make_toy, "tiny": Size(16, 1), "optimizer": "AdamW"})
    monkeypatch.setitem(MODELS, "resnet50", model)
    found = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(found[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = found[1:]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("arm", ["fp32", "lightning_bf16", "fp16"])
def test_a_run_is_measured_recorded_and_shown(arm: str, tmp_path: Path) -> None:
    run = Run("resnet50", arm, 16, 1)
    outcome = measure(run, "cpu", tiny=True)
    num = 32 * 64 + 64 * 64 + 64 * 32 + 64 + 64 + 32
    assert (outcome.status, outcome.num_parameters, outcome.memory["weights"]) == ("measured", num, 4 * num)
    assert outcome.flops == 3 * 2 * 16 * (32 * 64 + 64 * 64 + 64 * 32)
    assert outcome.samples_per_s is not None
    assert outcome.loss is not None
    records = [Record(MACHINE, run, outcome, "2026-11-22")]
    append(tmp_path / "records.json", records[0])
    assert read(tmp_path / "records.json") == records
    assert "A rehearsal: no figure of this section means anything" in page(records)


def test_the_published_page_is_that_of_the_published_records() -> None:
    text = (RESULTS / "headline.md").read_text(encoding="utf-8")
    assert text == page(read(RESULTS / "headline.json")), "run `python -m benchmarks.headline --page-only`"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "gpt2,llama_1b"]) == 0
    assert "gpt2, our bf16, 24 x 1024, eager" in capsys.readouterr().out
    assert main(["--tiny", "--out", str(RESULTS / "tiny" / "headline.json")]) == 2
    assert "is a rehearsal" in capsys.readouterr().err
    runs = plan(list(MODELS.values()))
    assert len(set(runs)) == len(runs)
