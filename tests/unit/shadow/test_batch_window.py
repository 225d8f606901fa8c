"""The window keeps the batches since the last step, up to a limit, and copies of edited ones."""

from __future__ import annotations

import pytest
from support import fit
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import OverflowLocator
from lightning_amp.shadow import _batch_window


def test_a_window_that_is_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch_window, "_WINDOW_BYTES", 300)  # two batches of 128 bytes
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(0, 7), accumulate_grad_batches=4, callbacks=[locator])
    assert [(r.batch_idx, r.cause) for r in locator.reports] == [(3, "not reproduced"), (7, "loss")]
    assert locator.reports[0].window == (0, 3)
