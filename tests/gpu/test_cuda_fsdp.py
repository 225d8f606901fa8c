"""FSDP1 where it lives: Lightning's own strategy and NCCL, the checks of `tests/distributed/test_fsdp.py`."""

from __future__ import annotations

import pytest
import torch
from distributed.fsdp_models import CASES
from distributed.fsdp_runs import Runs

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


def test_scalers(runs: Runs) -> None:
    runs.agree_without_shards()
    runs.use_the_users_scaler()


def test_checkpoints(runs: Runs) -> None:
    runs.resume()
    runs.resume_on_one_device()


def test_the_strategy_may_gather_half_parameters(runs: Runs) -> None:
    runs.may_gather_half_parameters()


def test_half_parameters_are_refused_with_a_line_that_works(runs: Runs) -> None:
    runs.name_the_line_for_half_parameters()
