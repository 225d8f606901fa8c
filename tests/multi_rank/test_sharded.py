"""`ModelParallelStrategy` on gloo ranks: FSDP2, tensor parallel and both, against one process in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from multi_rank.ranks import ONE_PER_BATCH, assert_agree
from support import assert_same
from support.launch import launch_once, shared_folder

SCRIPT = Path(__file__).parent / "sharded_scenarios.py"
REASONS = {
    "fsdp_accumulation": ["gradient", "loss", "none"],
    "one_shard_overflows": ["none"] * 4 + ["gradient"] + ["none"] * 4,
    "manual": [reason for reason in ONE_PER_BATCH for _ in range(2)],
    "callbacks": ONE_PER_BATCH * 2,
    "half_parameters": ["none"] * 9,
}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 4, shared_folder(tmp_path_factory, "four"))


def agreed(ranks: Ranks, name: str) -> dict[str, Any]:
    """Return the results of all ranks, after checking that they agree."""
    runs = [rank[name]["with"] for rank in ranks]
    for run in runs[1:]:
        assert_agree(run, runs[0])
    assert runs[0]["reasons"] == REASONS.get(name, ONE_PER_BATCH)
    return runs[0]


def assert_equals_one_process(ranks: Ranks, name: str) -> None:
    run, single = agreed(ranks, name), ranks[0][name]["single"]
    assert run["lr"] == single["lr"]
    for key in ("parameters", "optimizer"):
        assert_same(run[key], single[key], rtol=1e-5, atol=3e-7)  # sums over ranks have another order


@pytest.mark.parametrize(
    ("ranks", "name"),
    [("two", "unsynchronised"), pytest.param("four", "not_reduced_over_replicas", marks=pytest.mark.slow)],
)
def test_gradients_that_fsdp2_keeps_follow_the_scale(ranks: str, name: str, request: pytest.FixtureRequest) -> None:
    """Row 69: each of the two backwards counts once, as in fp32: 2 rows times 0.5, and 2 rows times 1."""
    for rank in request.getfixturevalue(ranks):
        assert rank[name]["scale"] > 1024.0
        torch.testing.assert_close(rank[name]["gradient"], torch.full((4, 8), 3.0))


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_fused_norm", "fsdp_value_bf16", "fsdp_accumulation", "tensor_parallel_norm", "tensor_parallel_value",
        "sequence_parallel_norm", "sequence_parallel_value", "one_shard_overflows", "manual",
    ],
)  # fmt: skip
def test_equals_one_process_without_the_bad_batches(name: str, two: Ranks) -> None:
    assert_equals_one_process(two, name)


def test_only_an_overflow_lowers_the_scale(two: Ranks) -> None:
    assert agreed(two, "fsdp_fused_norm")["scales"] == [1024.0] * 4 + [512.0] * 4 + [1024.0]


@pytest.mark.parametrize("name", ["batch_norm", "resume"])
def test_equals_the_run_without(name: str, two: Ranks) -> None:
    agreed(two, name)
    for rank in two:
        assert_agree(rank[name]["with"], rank[name]["without"], "parameters", "optimizer", "buffers", "lr")


@pytest.mark.parametrize("checkpoint", ["with", "whole"])
def test_a_resumed_run_continues_scale_and_counters(checkpoint: str, two: Ranks) -> None:
    for rank in two:
        resumed, at_once = rank["resume"][checkpoint], rank["resume"]["without"]
        assert_agree(resumed, at_once, "parameters", "optimizer", "lr", "scale", "tracker", "counts")


@pytest.mark.parametrize("name", ["half_precision_fp16", "half_precision_bf16"])
def test_beside_a_mixed_precision_policy(name: str, two: Ranks) -> None:
    assert agreed(two, name)["counts"] == (5, 4)


def test_callbacks_change_nothing_and_write_their_files_once(two: Ranks) -> None:
    first, second = (rank["callbacks"] for rank in two)
    agreed(two, "callbacks")
    assert not [line for rank in (first, second) for line in rank["said"] if "does not run" in line]
    for rank in (first, second):
        assert rank["skipped"] == rank["logged"]["amp/skipped_steps"] == rank["logged"]["amp/overflows"] == 8
        assert rank["files"][0] == "files/overflow_step00001_rank1.json"
        assert rank["files"][-1] == "files/scale_history.csv"
        assert rank["logged"]["amp/diff/val_loss"] == 0.0  # without autocast


def test_a_stuck_run_stops_on_all_ranks_and_names_parameters(two: Ranks) -> None:
    for rank in two:
        assert "2 optimizer steps in a row were skipped (the limit is 2)" in rank["stuck"]["message"]
        assert "`model.up.weight`" in rank["stuck"]["message"]


def test_shards_are_not_upcast_and_the_error_has_the_line_that_helps(two: Ranks) -> None:
    for rank in two:
        with_it, without = rank["half_parameters"]["messages"]
        assert "cannot upcast parameters that are sharded already: `model.gain`, `model.up.weight`" in with_it
        for message in (with_it, without):
            line = "Write `self.model.float()` at the start of `configure_model`, before `fully_shard(...)`"
            assert line in message
        assert "upcast_parameters" not in without
    assert_equals_one_process(two, "half_parameters")


@pytest.mark.slow
def test_three_device_meshes_in_one_optimizer(four: Ranks) -> None:
    assert_equals_one_process(four, "three_meshes")
    assert len(set(four[0]["three_meshes"]["with"]["kinds"])) == 3


@pytest.mark.slow
def test_three_device_meshes_fused(four: Ranks) -> None:
    """The parameters are in groups of their own, which changes the order of the state."""
    run = agreed(four, "three_meshes_fused")
    assert_same(run["parameters"], four[0]["three_meshes"]["single"]["parameters"], rtol=1e-5, atol=3e-7)
