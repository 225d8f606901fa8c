"""Fabric on two gloo ranks: the same weights, bit for bit, as in the Trainer, and both ranks decide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from multi_rank.fabric_scenarios import QUICK, SCENARIOS
from multi_rank.ranks import ONE_PER_BATCH, assert_agree
from support import assert_same
from support.launch import launch_once, shared_folder

SCRIPT = Path(__file__).parent / "fabric_scenarios.py"
OTHERS = ("stuck", "decoupled")
SLOW = tuple(name for name in SCENARIOS if name not in (*QUICK, *OTHERS))
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "fabric-quick"), *QUICK)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "fabric-slow"), *SLOW, *OTHERS)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_same_bits_as_the_trainer(name: str, request: pytest.FixtureRequest) -> None:
    if torch.__version__ < "2.11" and name.startswith("fsdp") and ("norm" in name or "accumulation" in name):
        pytest.skip("torch clips by another norm there: docs/guide/versions.md")
    ranks = request.getfixturevalue("quick" if name in QUICK else "slow")
    assert_agree(ranks[0][name]["fabric"], ranks[1][name]["fabric"])
    for rank in ranks:
        fabric, trainer = rank[name]["fabric"], rank[name]["trainer"]
        assert all(value.isfinite().all() for key in ("parameters", "optimizer", "buffers") for value in fabric[key])
        assert_same(fabric["buffers"], trainer["buffers"])
        assert_agree(fabric, trainer)
        if "accumulation" not in name:
            assert fabric["reasons"] == ONE_PER_BATCH
            assert fabric["counts"] == (5, 4)
        else:
            assert fabric["counts"] == (1, 2)


@pytest.mark.slow
def test_the_statistics_of_each_rank_are_its_own(slow: Ranks) -> None:
    """Otherwise the comparison of buffers would compare little."""
    one, other = (rank["fsdp_fp16_statistics_fused"]["fabric"]["buffers"] for rank in slow)
    with pytest.raises(AssertionError):
        assert_same(one, other)


@pytest.mark.slow
def test_a_stuck_run_stops_on_all_ranks(slow: Ranks) -> None:
    """Each rank of sharded parameters names the ones of its own shard."""
    one, other = (rank["stuck"] for rank in slow)
    assert one[0] == other[0]
    assert len(one) == len(other) == 2
    for message in one + other:
        assert "2 optimizer steps in a row were skipped" in message
        assert "body.0.weight" in message


@pytest.mark.slow
def test_only_the_ranks_of_a_group_train(slow: Ranks) -> None:
    assert [rank["decoupled"] for rank in slow] == [[], [(8, 1), (8, 1)]]
