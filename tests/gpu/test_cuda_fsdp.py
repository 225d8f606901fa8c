"""FSDP1 with Lightning's own strategy and NCCL: the checks of `tests/multi_rank/test_fsdp.py`."""

from __future__ import annotations

import pytest
import torch
from multi_rank.fsdp_models import CASES
from multi_rank.fsdp_runs import CHECKS, Runs

pytestmark = [
    pytest.mark.needs("nccl"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLD_SIZES = [
    1,
    pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")),
]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fsdp"), "cuda", request.param)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_in_fp32(name: str, runs: Runs) -> None:
    runs.equals_one_device_in_fp32(name)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_computes_in_what(precision: str, runs: Runs) -> None:
    runs.computes_in(precision)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, runs: Runs) -> None:
    getattr(runs, check)()
