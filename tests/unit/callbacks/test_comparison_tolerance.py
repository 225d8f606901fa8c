"""Names in `tolerance`, and what happens beyond it; whole runs are in `test_metric_comparison.py`."""

from __future__ import annotations

from typing import Any

import pytest
from zoo.validated import Model, make_trainer

from lightning_amp.callbacks._comparison_tolerance import Tolerance
from lightning_amp.reports import ComparisonRow, ComparisonTable


def table(tolerance: Any, amp: float) -> ComparisonTable:
    return ComparisonTable([ComparisonRow.of(0, 0, "val_loss", amp, 1.0)], tolerance)


def test_names_are_checked_once() -> None:
    tolerance, trainer = Tolerance({"acc": 0.1}, "warn"), make_trainer()
    with pytest.raises(ValueError, match="`tolerance` names metrics that validation does not log: \\['acc'\\]"):
        tolerance.check_names(trainer, Model(), {"val_loss"})
    tolerance.check_names(trainer, Model(), {"val_loss"})
    Tolerance(0.1, "warn").check_names(trainer, Model(), set())


def test_what_happens_beyond() -> None:
    trainer = make_trainer()
    Tolerance(0.5, "raise").judge(trainer, table(0.5, 1.4))
    Tolerance(None, "raise").judge(trainer, table(None, 9.0))
    with pytest.raises(RuntimeError, match="more than the tolerance in epoch 0: `val_loss`: AMP 1.6"):
        Tolerance(0.5, "raise").judge(trainer, table(0.5, 1.6))
    with pytest.warns(UserWarning, match="more than the tolerance"):
        Tolerance(0.5, "warn").judge(trainer, table(0.5, 1.6))
