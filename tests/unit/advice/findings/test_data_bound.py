"""A step that waits for its batch, and the advice for its loader."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from support.doctor_facts import only, step

from lightning_amp.advice._record import Loading
from lightning_amp.advice.findings._data_bound import FASTER_LOADING

PARTS = step().parts


@pytest.mark.parametrize(
    ("wait_s", "loading", "severity", "action"),
    [
        (0.1, Loading(0, 0.1, tried=((2, 0.05),)), "warning", "`num_workers=2, persistent_workers=True`"),
        (0.1, Loading(0, 0.1, tried=((2, 0.09),)), "warning", "do not help (tried here, per batch: 2: 90 ms)"),
        (0.1, Loading(0, 0.1), "warning", "Pass `num_workers=...`"),
        (0.1, Loading(4, 0.1, tried=((0, 0.02), (8, 0.05))), "warning", "Pass `num_workers=0` to"),
        (0.1, Loading(4, 0.1, tried=((0, 0.2), (8, 0.05))), "warning", "Pass `num_workers=8, persistent"),
        (0.1, Loading(2, 0.1, 0.09), "warning", "Pass `persistent_workers=True`"),
        (0.1, None, "warning", "Make the loader faster"),
        (0.015, Loading(0, 0.015, tried=((2, 0.01),)), "note", "`num_workers=2"),
        (
            0.1,
            Loading(0, 0.1, is_stream=True),
            "warning",
            "only if the `IterableDataset` gives each worker",
        ),
        (
            0.1,
            Loading(0, 0.1, tried=((2, 0.05),), is_stream=True),
            "warning",
            "`num_workers=2, persistent_workers=True`",
        ),
    ],
)
def test_a_step_that_waits_for_its_batch(wait_s: float, loading: Any, severity: str, action: str) -> None:
    found = only(step(parts={**PARTS, "data": wait_s}, loading=loading))
    assert (found.severity, found.code) == (severity, "data-bound")
    assert f"waits {wait_s * 1e3:.3g} ms" in found.message
    assert action in found.action


@pytest.mark.parametrize("batches", [8, 40])
def test_noise_does_not_make_a_loader_faster(batches: int) -> None:
    rng = random.Random(0)

    def mean_s() -> float:
        return sum(math.exp(rng.gauss(0.0, 0.2)) for _ in range(batches)) / batches

    wrong = sum(min(mean_s(), mean_s()) < FASTER_LOADING * mean_s() for _ in range(2000))
    assert wrong <= 0.01 * 2000
