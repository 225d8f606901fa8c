"""Run the scenarios of `tests/multi_rank/test_ddp.py` and `test_sharded.py` on GPUs, with NCCL.

Two things exist on CUDA only: synchronised BatchNorm, and a host that must not wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from multi_rank.ranks import ONE_PER_BATCH, assert_agree
from support import assert_same
from support.launch import ROOT, launch

COUNT = torch.cuda.device_count()

needs_two = pytest.mark.skipif(COUNT < 2, reason=f"needs 2 CUDA devices, there are {COUNT}")
needs_four = pytest.mark.skipif(COUNT < 4, reason=f"needs 4 CUDA devices, there are {COUNT}")


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_AMP_TEST_DEVICE", "cuda")  # the ranks import from here


def assert_traceless(ranks: list[dict[str, Any]], other: str) -> None:
    """Ranks agree to the bit, and the run equals its reference within rounding."""
    for name, result in ranks[0].items():
        if "with" not in result:
            continue
        for rank in ranks[1:]:
            assert_agree(rank[name]["with"], result["with"])
        if other in result:
            for key in ("parameters", "optimizer"):
                assert_same(result["with"][key], result[other][key], rtol=1e-4, atol=1e-5)


@pytest.mark.needs("nccl")
@needs_two
def test_ddp(tmp_path: Path) -> None:
    ranks = launch(ROOT / "tests" / "multi_rank" / "ddp_scenarios.py", 2, tmp_path)
    assert_traceless(ranks, "without")
    assert ranks[0]["every_kind_fused"]["with"]["reasons"] == ONE_PER_BATCH
    assert ranks[0]["sync_batch_norm"]["with"]["reasons"] == ONE_PER_BATCH
    for rank in ranks:
        assert_same(rank["sync_batch_norm"]["with"]["buffers"], rank["sync_batch_norm"]["without"]["buffers"])
        assert_same(rank["sync_batch_norm"]["with"]["buffers"], ranks[0]["sync_batch_norm"]["with"]["buffers"])
        assert rank["never_waits"]["with"]["counts"] == (9, 0)
        assert rank["no_gradients_on_one_rank"]["scales"] == [1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 4096.0]
    assert len(list((tmp_path / "overflows").iterdir())) == 3


@pytest.mark.needs("nccl")
@needs_two
def test_sharded_over_two(tmp_path: Path) -> None:
    ranks = launch(ROOT / "tests" / "multi_rank" / "sharded_scenarios.py", 2, tmp_path)
    assert_traceless(ranks, "single")
    assert ranks[0]["fsdp_fused_norm"]["with"]["reasons"] == ONE_PER_BATCH


@pytest.mark.needs("nccl")
@needs_four
def test_sharded_over_four(tmp_path: Path) -> None:
    ranks = launch(ROOT / "tests" / "multi_rank" / "sharded_scenarios.py", 4, tmp_path)
    assert_traceless(ranks, "single")
    assert ranks[0]["three_meshes"]["with"]["reasons"] == ONE_PER_BATCH
