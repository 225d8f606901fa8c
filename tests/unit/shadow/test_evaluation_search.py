"""The search for the batch and its reason; the planted faults are in `tests/promises/test_evaluation_diseases.py`."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE
from zoo.evaluation import BATCH_SIZE, Case, Offset, Temperatures, rows_for, validate

from lightning_amp.shadow import _first_batches

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def test_a_batch_that_was_not_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_first_batches, "MAX_BYTES", 700)
    module = Case()
    rows = rows_for(module)
    rows[BATCH_SIZE * 3]["y"][:] = float("nan")
    comparison, (said,) = validate(module, rows, "bf16")
    assert comparison.report is not None
    assert (comparison.report.batch_idx, comparison.report.cause) == (3, "unknown")
    assert "this batch was not kept for a second look" in said


def test_batches_that_are_edited() -> None:
    class Edits(Temperatures):
        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            batch["x"].mul_(2)

    torch.manual_seed(0)
    module = Edits()
    comparison, _ = validate(module, rows_for(module), "bf16")
    assert comparison.report is not None
    assert comparison.report.module == "kelvin"


def test_a_second_run_that_fails_is_no_error() -> None:
    class Twice(Offset):
        runs = 0

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            Twice.runs += 1
            if Twice.runs > 8:
                raise RuntimeError("only so often")
            self.log("val_loss", float("nan"))

    module = Twice()
    comparison, (said,) = validate(module, rows_for(module), "bf16")
    assert comparison.report is not None
    assert "the validation step could not be run a second time (RuntimeError: only so often)" in said


def test_a_finite_metric_without_a_reason_is_left_alone() -> None:
    class Autocast(Case):
        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("autocast", 0.3 + float(torch.is_autocast_enabled(DEVICE)))

    module = Autocast()
    comparison, said = validate(module, rows_for(module), "bf16")
    assert (said, comparison.report) == ([], None)
    assert comparison.table[0].diff == pytest.approx(1)
