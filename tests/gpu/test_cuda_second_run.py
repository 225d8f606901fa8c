"""Callbacks run steps of FSDP2 modules a second time with NCCL: the checks of `test_second_run_failures.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from multi_rank.ranks import assert_agree
from multi_rank.test_second_run_failures import FEW, HEALTHY, SCRIPT, check
from support.launch import launch

pytestmark = [
    pytest.mark.needs("nccl"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_callbacks_change_nothing_on_one_gpu(tmp_path: Path) -> None:
    (rank,) = launch(SCRIPT, 1, tmp_path, "nothing fails", "callbacks")
    assert_agree(rank["callbacks"], rank["nothing fails"], "parameters", "counts")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_that_fails_lets_training_go_on_with_nccl(tmp_path: Path) -> None:
    ranks = launch(SCRIPT, 2, tmp_path, *HEALTHY, *FEW)
    for name in FEW:
        check(ranks, name)
