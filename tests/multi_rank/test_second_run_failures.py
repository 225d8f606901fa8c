"""A rank that fails in a second run does not stop the others; a rank that is gone ends the fit in its time limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multi_rank.ranks import assert_agree
from support.launch import launch, launch_once, shared_folder

SCRIPT = Path(__file__).parent / "second_run_failures.py"
HEALTHY = ["nothing fails", "ddp, nothing fails"]
FEW = ["late error, ranks (1,)", "ddp, memory, ranks (1,)"]
ALL = [
    f"{ddp}{how}, ranks {ranks}"
    for ddp in ("", "ddp, ")
    for how in ("error", "late error", "memory", "backward")
    for ranks in ((1,), (0,), (0, 1))
]
REST = [name for name in ALL if name not in FEW]
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "second-failures"), *HEALTHY, *FEW)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch_once(SCRIPT, 2, shared_folder(tmp_path_factory, "second-failures-rest"), *HEALTHY, *REST)


def check(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert_agree(rank[name], rank["ddp, " * name.startswith("ddp") + "nothing fails"], "parameters", "counts")
    failed = [i for i in (0, 1) if str(i) in name.partition("ranks")[2]]
    said = [[text for text in rank[name]["warnings"] if "training goes on" in text] for rank in ranks]
    assert [i for i in (0, 1) if said[i]] == failed
    reason = "out of memory" if "memory" in name else "has a problem"
    assert all(reason in text for i in failed for text in said[i])
    assert any(reason in note for note in ranks[0][name]["notes"])
    assert ranks[0][name]["notes"] == ranks[1][name]["notes"]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_a_rank_that_fails_lets_training_go_on(name: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue("few" if name in FEW else "rest"), name)


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_fit_within_the_time_limit(tmp_path: Path) -> None:
    message = launch(SCRIPT, 2, tmp_path, "gone", timeout_s=60)[0]["gone"]
    assert "another rank did not answer within 4 s (the strategy's `timeout`)" in message
