"""Row 29: FSDP1 in two real gloo processes is one device, but for rounding."""

from __future__ import annotations

import pytest
from distributed.fsdp_models import CASES
from distributed.fsdp_runs import Runs
from support.launch import shared_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(shared_folder(tmp_path_factory, "fsdp"), "cpu", 2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_device_in_fp32(name: str, runs: Runs) -> None:
    runs.equals_one_device_in_fp32(name)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_computes_in_what(precision: str, runs: Runs) -> None:
    runs.computes_in(precision)


def test_a_rank_without_a_shard_agrees(runs: Runs) -> None:
    runs.agree_without_shards()


def test_the_users_scaler_is_used(runs: Runs) -> None:
    runs.use_the_users_scaler()


def test_checkpoints(runs: Runs) -> None:
    runs.resume()


def test_a_full_checkpoint_is_an_ordinary_one(runs: Runs) -> None:
    runs.resume_on_one_device()


def test_half_parameters_are_refused_with_a_line_that_works(runs: Runs) -> None:
    runs.name_the_line_for_half_parameters()


def test_the_strategy_may_gather_half_parameters(runs: Runs) -> None:
    runs.may_gather_half_parameters()
