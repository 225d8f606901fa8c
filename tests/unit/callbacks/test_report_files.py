"""Files of reports: at most one complaint. What is in them: `test_overflow_locator.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fit
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import OverflowLocator


def test_one_file_per_report_and_its_step(tmp_path: Path) -> None:
    fit(BadRow, fp16(), with_bad(2, 5), callbacks=[OverflowLocator(dirpath=tmp_path, save_bundles=True)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "overflow_step00002_rank0.json", "overflow_step00002_rank0.pt",
        "overflow_step00005_rank0.json", "overflow_step00005_rank0.pt",
    ]  # fmt: skip


def test_a_batch_that_cannot_be_pickled_is_said_once(tmp_path: Path) -> None:
    class Odd(BadRow):
        def on_after_batch_transfer(self, batch, dataloader_idx):  # type: ignore[no-untyped-def]
            return {"x": batch, "odd": lambda: None}

        def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
            return self.loss(batch["x"])

    locator = OverflowLocator(dirpath=tmp_path, save_bundles=True)
    with pytest.warns(UserWarning, match="could not write") as caught:
        fit(Odd, fp16(), with_bad(1, 2), callbacks=[locator])
    assert sum("could not write" in str(w.message) for w in caught) == 1
    assert len(locator.reports) == 2
    assert len(list(tmp_path.glob("*.json"))) == 2
