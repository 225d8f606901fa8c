"""Shares of a comparison, trained one by one in any order, and collected. No run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.synthetic import failed
from zoo.compared import TRAINER, Sea, Waves
from zoo.executors import Inline, trained_here, trained_there

from lightning_amp.compare import Comparison, Spec, _compare, _process


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    keys: list[tuple[str, int]] = []

    def here(spec: Spec, *_: Any) -> Any:
        keys.append((spec.label, spec.seed))
        return trained_here(spec)

    monkeypatch.setattr(_compare, "run_in_process", here)
    monkeypatch.setattr(_process, "run_packed", trained_there)
    return keys


def comparison(folder: Path | None, **kwargs: Any) -> Comparison:
    usual: dict[str, Any] = {
        "seed": 0,
        "num_seeds": 4,
        "control": None,
        "margins": {"val_loss": 0.1},
        "trainer_kwargs": TRAINER,
    }
    return Comparison(Waves, Sea, ("fp32", "bf16"), dirpath=folder, **(usual | kwargs))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 7, 12, 13, 40])
def test_all_parts_together_are_all_runs_once_each(num_parts: int, tmp_path: Path, ran: list[tuple[str, int]]) -> None:
    shares = [comparison(tmp_path / str(i)).run_part(i, num_parts) for i in range(1, num_parts + 1)]
    assert ran == list(comparison(None).plan.runs())
    assert [(run.label, run.seed) for share in shares for run in share] == ran
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_part_is_stable(tmp_path: Path, ran: list[tuple[str, int]]) -> None:
    """It has the same runs whatever other parts have finished, and repeated it trains nothing."""
    alone = [(run.label, run.seed) for run in comparison(tmp_path / "alone").run_part(2, 3)]
    for part in (3, 1, 2):
        runs = comparison(tmp_path / "all").run_part(part, 3)
    assert [(run.label, run.seed) for run in runs] == alone
    ran.clear()
    assert [(run.label, run.seed) for run in comparison(tmp_path / "all").run_part(2, 3)] == alone
    assert ran == []


@pytest.mark.parametrize("executor", [None, Inline()], ids=["in order", "executor"])
def test_parts_in_any_order_have_the_report_of_one_call(
    executor: Any, tmp_path: Path, ran: list[tuple[str, int]]
) -> None:
    for part in (3, 1, 2):
        comparison(tmp_path, executor=executor).run_part(part, 3)
    ran.clear()
    report = comparison(tmp_path).collect()
    assert ran == []
    expected = comparison(None).run()
    assert str(report) == str(expected)
    assert {label: arm.runs for label, arm in report.arms.items()} == {
        label: arm.runs for label, arm in expected.arms.items()
    }


def test_runs_that_are_missing_count_as_failed(tmp_path: Path, ran: list[tuple[str, int]]) -> None:
    comparison(tmp_path).run_part(1, 3)
    comparison(tmp_path).run_part(3, 3)
    ran.clear()
    report = comparison(tmp_path).collect()
    missing = {(label, seed) for label, arm in report.arms.items() for seed in arm.errors}
    assert missing == set(list(comparison(None).plan.runs())[4:8])
    assert ran == []
    assert "`bf16, seed 1`: it left no record" in str(report)
    assert report.verdict("bf16", "val_loss").claim == "undecided"
    assert str(comparison(tmp_path / "empty").collect())


def test_a_run_that_failed_is_collected_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of its part trains it again."""

    def run(spec: Spec, _: Any) -> Any:
        return failed(spec.label, spec.seed) if spec.label == "bf16" else trained_here(spec)

    again = _compare.run_in_process
    monkeypatch.setattr(_compare, "run_in_process", run)
    comparison(tmp_path).run_part(1, 1)
    report = comparison(tmp_path).collect()
    assert list(report.arms["bf16"].errors) == [0, 1, 2, 3]
    assert "no record" not in str(report)
    monkeypatch.setattr(_compare, "run_in_process", again)
    comparison(tmp_path).run_part(1, 1)
    assert comparison(tmp_path).collect().arms["bf16"].errors == {}


def test_a_margin_for_a_metric_that_no_run_logged(tmp_path: Path) -> None:
    comparison(tmp_path).run_part(1, 1)
    with pytest.raises(ValueError, match="got 'val_acc'; it logs `val_loss`"):
        comparison(tmp_path, margins={"val_acc": 0.1}).collect()
