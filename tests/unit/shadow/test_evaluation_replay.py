"""Batches of an evaluation that run again, on shadows: the real module, its metrics and random numbers stay."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import quiet_trainer
from torch.utils.data import DataLoader
from zoo.evaluation import BATCH_SIZE, Case, Temperatures, rows_for

from lightning_amp import AmpPrecision
from lightning_amp.shadow._evaluation_replay import EvaluationReplay
from lightning_amp.shadow._first_batches import FirstBatches

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class AtTheEnd(pl.Callback):
    """Does something at the end of the evaluation."""

    def __init__(self, work: Any) -> None:
        self.batches = FirstBatches("cpu", 1)
        self.work = work

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.batches.add(batch, batch_idx, None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.work(EvaluationReplay(trainer, pl_module, "validation", "val_loss", None), self.batches.kept)


def run(module: Case, work: Any) -> None:
    trainer = quiet_trainer(plugins=AmpPrecision("bf16"), callbacks=[AtTheEnd(work)])
    trainer.validate(module, DataLoader(rows_for(module), batch_size=BATCH_SIZE), verbose=False)


def test_one_batch_or_several() -> None:
    found: dict[str, Any] = {}

    def work(replay: EvaluationReplay, kept: list[Any]) -> None:
        before = torch.get_rng_state()
        found["fp32"] = [replay.in_fp32([one]) for one in kept]
        found["all"] = replay.in_fp32(kept)
        found["amp"] = replay.in_amp(kept[:1])
        found["again"] = replay.in_amp(kept[:1])
        found["cured"] = replay.in_amp(kept[:1], rules=["kelvin"])
        found["eval"] = replay.in_fp32(kept[:1], upcast=False)
        assert torch.equal(before, torch.get_rng_state())

    torch.manual_seed(0)
    module = Temperatures()
    run(module, work)
    assert found["all"] == pytest.approx(sum(found["fp32"]) / len(found["fp32"]))
    assert found["amp"] == found["again"]
    assert found["amp"] > 5 * found["fp32"][0]
    assert found["cured"] == pytest.approx(found["fp32"][0], rel=0.2)
    assert found["eval"] == found["fp32"][0]
    assert "forward" not in vars(module.kelvin)


def test_a_metric_that_is_not_logged() -> None:
    def work(replay: EvaluationReplay, kept: list[Any]) -> None:
        replay._metric = "other"
        assert replay.in_fp32(kept[:1]) is None

    run(Case(), work)


def test_operations() -> None:
    names: list[str] = []

    def work(replay: EvaluationReplay, kept: list[Any]) -> None:
        fp32, amp = replay.operations(kept[:1])
        assert [call.name for call in fp32.calls] == [call.name for call in amp.calls]
        names.extend(call.name for call in amp.calls)

    run(Case(), work)
    assert names[:5] == ["linear", "tanh", "linear", "float", "mse_loss"]
