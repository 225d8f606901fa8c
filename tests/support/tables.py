"""Make rows for the tables of `lightning_amp.reports`."""

from __future__ import annotations

from typing import Any

from lightning_amp.findings import ComparisonRow, GradientRow, StepRecord
from lightning_amp.reports import ComparisonTable


def comparisons() -> ComparisonTable:
    rows = [
        ComparisonRow.of(epoch, epoch * 10, metric, 1.0 + 0.1 * epoch, 1.0)
        for epoch in range(3)
        for metric in ("acc/dataloader_idx_0", "acc/dataloader_idx_1", "loss")
    ]
    return ComparisonTable(rows, tolerance={"loss": 0.15})


def many_comparisons(number: int = 20, tolerance: Any = None) -> ComparisonTable:
    """Return a table in which metric `i` differs by `i` per mille. Neighbours have different magnitudes."""
    rows = [
        ComparisonRow.of(epoch, epoch, f"m{i}", 10.0 ** (i % 3) * (1 + i / 1000), 10.0 ** (i % 3))
        for epoch in range(2)
        for i in range(number)
    ]
    return ComparisonTable(rows, tolerance=tolerance)


def gradient_row(step: int, name: str, **values: Any) -> GradientRow:
    usual: dict[str, Any] = {
        "num_values": 10,
        "underflow_fraction": 0.0,
        "subnormal_fraction": 0.0,
        "headroom_bits": 3.0,
        "sqnr_db": 50.0,
        "cosine": 0.999,
        "largest": 1.0,
        "scale": 1.0,
    }
    return GradientRow(step=step, name=name, **(usual | values))


def hundred_gradients() -> list[GradientRow]:
    """Return one sample with three bad rows, each bad in a different way."""
    bad = {
        40: {"headroom_bits": -2.0},
        50: {"sqnr_db": 3.0},
        60: {"underflow_fraction": 0.9, "headroom_bits": 30.0},
    }
    return [gradient_row(0, f"layer.{i}", **bad.get(i, {"headroom_bits": 5.0 + i / 100})) for i in range(100)]


def scale_records(overflows: dict[int, str], steps: int) -> list[StepRecord]:
    records: list[StepRecord] = []
    scale = 1024.0
    for index in range(steps):
        reason = overflows.get(index, "none")
        next_scale = scale / 2 if reason == "gradient" else scale
        records.append(StepRecord(index, 0, scale, next_scale, reason != "none", reason))  # type: ignore[arg-type]
        scale = next_scale
    return records
