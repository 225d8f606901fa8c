from __future__ import annotations

import pytest
import torch

from lightning_amp.numerics import fitting_scale, widest_dtype
from lightning_amp.numerics._limits import FP16_LARGEST, FP16_ROUNDS_TO_NORMAL, FP16_ROUNDS_TO_ZERO


def converted(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).half().float())


def beside(value: float, towards: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(towards)))


def test_thresholds_of_fp16_are_where_a_conversion_changes() -> None:
    smallest_normal = torch.finfo(torch.float16).smallest_normal
    assert torch.finfo(torch.float16).max == FP16_LARGEST
    assert converted(FP16_ROUNDS_TO_ZERO) == 0
    assert converted(beside(FP16_ROUNDS_TO_ZERO, 1.0)) == 2.0**-24
    assert converted(FP16_ROUNDS_TO_NORMAL) == smallest_normal
    assert converted(beside(FP16_ROUNDS_TO_NORMAL, 0.0)) < smallest_normal


def test_fitting_scale() -> None:
    assert fitting_scale(65504.0, 0) == 1
    assert fitting_scale(65505.0, 0) == 0.5
    assert fitting_scale(1.0) == 2.0**13
    assert (fitting_scale(1e-30), fitting_scale(0.0), fitting_scale(1e30)) == (2.0**24, 2.0**24, 2.0**-14)


def test_what_a_device_computes_in_at_most(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_dtype(device) == torch.float64

    def fail(*args: object, **kwargs: object) -> None:
        raise TypeError("the MPS framework doesn't support float64")

    monkeypatch.setattr(torch, "ones", fail)
    assert widest_dtype(torch.device("mps", 7)) == torch.float32
