"""Random numbers are the same in a second run, and fp32 is fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_amp.tracing import RandomState, full_precision, paired_random


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


def precisions() -> dict[str, str]:
    backends: Any = torch.backends
    switches = {
        "all": backends, "cuda": backends.cudnn, "matmul": backends.cuda.matmul, "conv": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn, "cpu matmul": backends.mkldnn.matmul, "cpu conv": backends.mkldnn.conv,
        "cpu rnn": backends.mkldnn.rnn,
    }  # fmt: skip
    return {name: switch.fp32_precision for name, switch in switches.items()}


@pytest.mark.parametrize("setting", ["default", "high", "medium", "all tf32", "matmul tf32"])
def test_reduced_precision_is_off_and_restored(setting: str) -> None:
    backends: Any = torch.backends
    if setting in ("high", "medium"):
        torch.set_float32_matmul_precision(setting)
    elif setting == "all tf32":
        backends.fp32_precision = "tf32"
    elif setting == "matmul tf32":
        backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = precisions()
        with torch.autocast("cpu", dtype=torch.bfloat16), full_precision("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            leaves = {value for name, value in precisions().items() if name not in ("all", "cuda")}
            assert leaves <= {"ieee", "none"}
        assert precisions() == found
        if setting == "all tf32":  # what was inherited still is
            backends.fp32_precision = "ieee"
            assert precisions()["matmul"] == "ieee"
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "tf32"


def test_a_packed_state_loads_without_code_and_draws_the_same(tmp_path: Path) -> None:
    state = RandomState.capture("cpu")
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    torch.save(state.pack(), tmp_path / "state.pt")
    packed = torch.load(tmp_path / "state.pt", weights_only=True)
    with paired_random("cpu", RandomState.unpack(packed, "cpu")):
        assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))


class Backend:
    """A machine with two devices of a kind."""

    def __init__(self) -> None:
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = states


@pytest.mark.parametrize(("saved", "expected"), [([5], [5, 5]), ([5, 6], [5, 6]), ([5, 6, 7], [5, 6]), (None, [1, 2])])
def test_a_state_of_more_or_fewer_devices_fits(
    saved: list[int] | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: backend)
    states = None if saved is None else [torch.tensor([value]) for value in saved]
    packed = RandomState.capture("cpu")._replace(accelerator=states).pack()
    with paired_random("cuda", RandomState.unpack(packed, "cuda")):
        assert [int(state) for state in backend.states] == expected
    assert [int(state) for state in backend.states] == [1, 2]
