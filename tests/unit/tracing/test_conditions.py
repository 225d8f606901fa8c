"""A second run draws the same random numbers, and computes fp32 without TF32 or bf16."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_amp.tracing import full_precision, paired_random


def test_random_generators_are_paired() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    pl.seed_everything(1, verbose=False)
    with paired_random("cpu"):
        first = draw()
    with paired_random("cpu"), pytest.raises(ZeroDivisionError):
        assert draw() == first
        raise ZeroDivisionError
    assert draw() == first
    assert draw() != first


TF32: dict[str, Callable[[Any], object]] = {
    "default": lambda _: None,
    "high": lambda _: torch.set_float32_matmul_precision("high"),
    "all tf32": lambda backends: setattr(backends, "fp32_precision", "tf32"),
    "matmul tf32": lambda backends: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
}


def precisions() -> dict[str, str]:
    backends: Any = torch.backends
    switches = {
        "all": backends, "cuda": backends.cudnn, "matmul": backends.cuda.matmul, "conv": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn, "cpu matmul": backends.mkldnn.matmul, "cpu conv": backends.mkldnn.conv,
        "cpu rnn": backends.mkldnn.rnn,
    }  # fmt: skip
    return {name: switch.fp32_precision for name, switch in switches.items()}


@pytest.fixture
def default_switches() -> Iterator[None]:
    yield
    backends: Any = torch.backends
    backends.fp32_precision = "none"
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "tf32"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("default_switches")
@pytest.mark.parametrize("setting", TF32)
def test_reduced_precision_is_off_and_restored(setting: str) -> None:
    backends: Any = torch.backends
    TF32[setting](backends)
    found = precisions()
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision("cpu"):
        assert not torch.is_autocast_enabled("cpu")
        leaves = {value for name, value in precisions().items() if name not in ("all", "cuda")}
        assert leaves <= {"ieee", "none"}
    assert precisions() == found
    if setting == "all tf32":  # inherited values are inherited again
        backends.fp32_precision = "ieee"
        assert precisions()["matmul"] == "ieee"
