"""Row 29: FSDP1 in two real gloo processes equals one device, except for rounding."""

from __future__ import annotations

import pytest
from multi_rank.fsdp_models import CASES
from multi_rank.fsdp_runs import CHECKS, Runs
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


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, runs: Runs) -> None:
    getattr(runs, check)()
