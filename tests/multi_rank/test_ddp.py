"""Two gloo ranks with trouble on one: both decide alike, and the run equals one that never drew the bad batches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_rank.ddp_scenarios import SCENARIOS, Net, train
from multi_rank.ranks import BAD, ONE_PER_BATCH, assert_agree, fused
from support import DEVICE, assert_same
from support.launch import launch_once, shared_folder

from lightning_amp import AmpPrecision

SCRIPT = Path(__file__).parent / "ddp_scenarios.py"
REASONS = {
    "infinite_losses_with_finite_gradients": ["none"] * 9,
    "mended_gradients": ["none"] * 9,
    "accumulation": ["gradient", "loss", "none"],
    "mended_after_unscale": ["gradient", "loss", "none"],
    "accumulation_unfused": ["none", "loss", "gradient"],
    "overflow_reports": ["none", "loss", "none", "loss", *["none"] * 5],
    "overflow_reports_of_a_step_with_collectives": ["loss", "none", "gradient", "none", "none"],
    "gradient_figures": ["none", "loss", "none", "loss", *["none"] * 5],
}
for name in ("manual_bsbs_fused", "manual_bsbs_unfused", "manual_bbss_fused", "manual_bbss_unfused"):
    REASONS[name] = [reason for second in ONE_PER_BATCH for reason in ("none", second)]
TRAINED = [name for name in SCENARIOS if name not in ("no_gradients_on_one_rank", "stuck", "half_parameters", "auto")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "ddp")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch_once(SCRIPT, 2, folder)


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_agree_and_the_bad_batches_leave_no_trace(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[name]["with"] for rank in ranks)
    assert_agree(first, second)
    assert first["reasons"] == REASONS.get(name, ONE_PER_BATCH)
    assert first["counts"] == (first["reasons"].count("none"), len(first["reasons"]) - first["reasons"].count("none"))
    assert all(value.isfinite().all() for key in ("parameters", "optimizer", "buffers") for value in first[key])
    for rank in ranks:
        if "without" in rank[name]:
            assert_agree(rank[name]["with"], rank[name]["without"], "parameters", "optimizer", "buffers", "lr")


@pytest.mark.skipif(DEVICE != "cpu", reason="only a CPU is measured")
def test_rank_0_decides_what_auto_is(ranks: list[dict[str, Any]]) -> None:
    found = [rank["auto"] for rank in ranks]
    assert found[0] == found[1] == {"precision": "32-true", "precisions": ["fp32"] * 9}


def test_only_an_overflow_lowers_the_scale(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["every_kind_fused"]["with"]["scales"] == [1024.0] * 4 + [512.0] * 4 + [1024.0]
    assert ranks[0]["accumulation"]["with"]["scales"] == [512.0] * 3
    assert ranks[0]["mended_gradients"]["with"]["scales"] == [1024.0] * 4 + [512.0] * 4 + [1024.0]


def test_equals_one_process_with_the_whole_batches(ranks: list[dict[str, Any]]) -> None:
    single = train(
        Net({}, fused, norm=False), BAD, AmpPrecision("fp32"), world_size=1, gradient_clip_val=0.5
    )  # fmt: skip
    assert_same(ranks[0]["static_graph"]["with"]["parameters"], single["parameters"], rtol=1e-5, atol=1e-6)


def test_half_parameters_are_upcast_and_resume(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        runs = rank["half_parameters"]
        assert {value.dtype for value in runs["whole"]["parameters"]} == {torch.float32}
        for other in ("resumed", "float32"):
            assert_agree(runs["whole"], runs[other], "parameters", "optimizer", "lr", "counts")


def test_an_optimizer_without_gradients_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """Count steps where gradients are missing.

    Step 2 has none on any rank, so the scale does not grow. Step 3, with a NaN loss on the rank without gradients,
    counts. Step 5 overflows, and that loss is the reason.
    """
    one, other = (rank["no_gradients_on_one_rank"] for rank in ranks)
    for key in ("scales", "tracker", "counts"):
        assert one[key] == other[key]
    assert one["scales"] == [1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 4096.0]
    assert (one["tracker"], one["counts"]) == (0, (4, 1)), "step 2, without gradients, is no step"
    assert one["weight"] == [1 - 0.5 * 4] * 3
    assert other["weight"] == [1.0] * 3


def test_rank_zero_reports_for_all(ranks: list[dict[str, Any]], folder: Path) -> None:
    one, other = (rank["overflow_reports"] for rank in ranks)
    assert one["reports"] == other["reports"] == [(1, 1, "forward", 1), (3, 0, "forward", 3), (3, 1, "forward", 3)]
    assert other["said"] == ""
    assert one["said"].count(" skipped (batch") == 1, "the same cause, again and on the other rank, is not printed"
    assert "Step 1 skipped (batch 1, rank 1): " in one["said"]
    stems = ["overflow_step00001_rank1", "overflow_step00003_rank0", "overflow_step00003_rank1"]
    files = sorted((folder / "overflows").iterdir())
    assert [file.name for file in files] == [f"{stem}.json" for stem in stems]
    assert json.loads(files[0].read_text())["rank"] == 1


def test_a_bad_loss_on_one_rank_is_reported_to_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["infinite_losses_with_finite_gradients"]["reports"] == [(1, 1, "loss", False)]


def test_the_search_runs_as_many_passes_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """A rank that runs fewer passes leaves the others waiting in `self.all_gather`.

    Only the rank that has the fault reports it.
    """
    one, other = (rank["overflow_reports_of_a_step_with_collectives"]["reports"] for rank in ranks)
    assert one == other
    assert one[0] == (0, 1, "loss", 0)
    assert [(step, rank, batch) for step, rank, _, batch in one[1:]] == [(2, 1, 5)]


def test_a_stuck_run_stops_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["stuck"] for rank in ranks)
    assert one == other
    assert "2 optimizer steps in a row were skipped" in one["message"]
    assert one["reports"] == [(1, 1, "backward"), (2, 0, "loss")]


def test_gradient_figures_are_those_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["gradient_figures"] for rank in ranks)
    assert str(one["rows"]) == str(other["rows"])
    for row, mine, yours in zip(one["rows"], one["alone"], other["alone"], strict=True):
        assert row["name"] == mine["name"] == yours["name"]
        assert row["num_values"] == mine["num_values"] + yours["num_values"]
        for key in ("underflow_fraction", "subnormal_fraction"):
            both = mine[key] * mine["num_values"] + yours[key] * yours["num_values"]
            assert row[key] == pytest.approx(both / row["num_values"])
        assert row["headroom_bits"] == min(mine["headroom_bits"], yours["headroom_bits"])
        assert row["largest"] == max(mine["largest"], yours["largest"])
        assert math.isfinite(row["sqnr_db"])
        assert min(mine["sqnr_db"], yours["sqnr_db"]) <= row["sqnr_db"] <= max(mine["sqnr_db"], yours["sqnr_db"])
    assert one["rows"][0]["largest"] > 10 * one["alone"][0]["largest"], "the largest gradients are on the other rank"


def test_a_rank_that_cannot_run_its_step_again_is_left_out(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["gradient_figures"] for rank in ranks)
    assert str(one["broken"]) == str(other["broken"])
    assert [row["num_values"] for row in one["broken"]] == [row["num_values"] for row in one["alone"]]
    assert one["warned"] == []
    assert len(other["warned"]) == 1
    assert "on rank 1: the training step could not be run a second time" in other["warned"][0]
