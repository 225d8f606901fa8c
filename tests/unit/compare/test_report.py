from __future__ import annotations

import copy
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.reports import REPORTS, make_report
from support.synthetic import compared, make_plan, make_run

from lightning_amp.compare import _report
from lightning_amp.compare._plan import CONTROL
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import ArmRun


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def strictly(path: Path) -> Any:
    """Read a file as standard JSON: UTF-8, without NaN and infinities."""
    return json.loads(path.read_bytes().decode("utf-8", errors="strict"), parse_constant=refuse)


def runs_of(report: PrecisionReport) -> list[ArmRun]:
    return [run for arm in report.arms.values() for run in arm.runs]


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in REPORTS if kind != "many"])  # which takes seconds
def test_json_is_the_source(kind: str, tmp_path: Path) -> None:
    report = REPORTS[kind]()
    path = tmp_path / "new" / "report.json"
    report.to_json(path)
    again = PrecisionReport.from_json(path)
    assert again.to_markdown() == report.to_markdown()
    assert (again.recommended, again.recommendation) == (report.recommended, report.recommendation)
    assert again.plan == report.plan
    assert list(map(repr, runs_of(again))) == list(map(repr, runs_of(report)))
    first = strictly(path)
    again.to_json(path)
    assert strictly(path) == first


def test_the_fields_that_a_script_reads(tmp_path: Path) -> None:
    report = make_report(3, 3)
    report.to_json(tmp_path / "report.json")
    data = strictly(tmp_path / "report.json")
    assert data["format"] == 1
    assert (data["recommended"], data["recommendation"]) == (report.recommended, report.recommendation)
    assert data["verdicts"]["bf16"]["val_acc"] == str(report.verdict("bf16", "val_acc"))
    assert list(data["verdicts"]) == list(report.arms)
    speed = report.arms["bf16"].speed
    assert speed is not None
    assert data["speeds"]["bf16"] == {
        "claim": speed.claim, "ratio": speed.ratio, "low": speed.low, "high": speed.high, "num_repetitions": 3,
    }  # fmt: skip
    assert list(data["speeds"]) == list(report.arms)[1:]
    assert len(data["runs"]) == 3 * 4


def test_a_url(folder_url: str) -> None:
    report = make_report(2, 1)
    report.to_json(f"{folder_url}/report.json")
    assert str(PrecisionReport.from_json(f"{folder_url}/report.json")) == str(report)


GOOD: dict[str, Any] = {
    "format": 1,
    "plan": make_plan(["fp32", "bf16"], 1).to_data(),
    "runs": [make_run("fp32").to_data(), make_run("bf16").to_data()],
}


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**GOOD, "made_by": "a newer version"}))
    assert list(PrecisionReport.from_json(path).arms) == ["fp32", "bf16"]


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "torn": json.dumps(GOOD).encode()[:-40],
    "no JSON": b"precision: fp32\n",
    "no text": b"\xff\xfe\x00{",
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 200_000,
    "a long number": b'{"format": ' + b"1" * 6000 + b"}",
    "no format": json.dumps({**GOOD, "format": None}).encode(),
    "another format": json.dumps({**GOOD, "format": 2}).encode(),
    "no plan": json.dumps({name: GOOD[name] for name in ("format", "runs")}).encode(),
    "no runs": json.dumps({name: GOOD[name] for name in ("format", "plan")}).encode(),
    "runs are no list": json.dumps({**GOOD, "runs": 3}).encode(),
    "runs by name": json.dumps({**GOOD, "runs": {"fp32": GOOD["runs"][0]}}).encode(),
    "a broken plan": json.dumps({**GOOD, "plan": {**GOOD["plan"], "num_seeds": "one"}}).encode(),
    "a broken run": json.dumps({**GOOD, "runs": [{**GOOD["runs"][0], "loss": [[0]]}]}).encode(),
    "a run twice": json.dumps({**GOOD, "runs": GOOD["runs"] * 2}).encode(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "my report.json"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(ValueError, match=r"my report\.json` is not what `PrecisionReport\.to_json` writes: \S"):
        PrecisionReport.from_json(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="report"):
        PrecisionReport.from_json(tmp_path / "report.json")


# -- the object --------------------------------------------------------------------------------------------------------


def test_the_order_of_the_runs_does_not_matter() -> None:
    report = make_report(3, 3)
    shuffled = runs_of(report)
    random.Random(3).shuffle(shuffled)
    again = PrecisionReport(report.plan, iter(shuffled))
    assert str(again) == str(report)
    assert runs_of(again) == runs_of(report)
    assert [run.seed for run in again.arms["bf16"].runs] == [0, 1, 2]


def test_arms_are_read_only_and_the_control_is_last() -> None:
    arms: Any = make_report(3, 2).arms
    assert list(arms) == ["fp32", "bf16", "fp16", CONTROL]
    with pytest.raises(TypeError):
        arms["fp64"] = arms["fp32"]
    with pytest.raises(TypeError):
        del arms["fp32"]


def test_runs_of_another_plan_are_left_out() -> None:
    runs = [make_run("fp32"), make_run("bf16"), make_run("fp8"), make_run("fp32", 7)]
    assert runs_of(PrecisionReport(make_plan(["fp32", "bf16"], 1), runs)) == runs[:2]


def test_a_run_that_is_there_twice() -> None:
    with pytest.raises(ValueError, match="`runs` must hold one run of each arm and seed, got two of 'bf16', 1"):
        PrecisionReport(make_plan(["fp32", "bf16"], 2), [make_run("bf16", 1), make_run("fp32", 1), make_run("bf16", 1)])


def test_very_many_seeds_take_no_time() -> None:
    plan = replace(make_plan(["fp32"], 1), num_seeds=2**40)
    assert runs_of(PrecisionReport(plan, [make_run("fp32", 2**39)])) == [make_run("fp32", 2**39)]


def test_a_verdict_that_does_not_exist() -> None:
    report = compared({"fp32": [1.0], "bf16": [1.0]})
    with pytest.raises(KeyError, match=r"There is no arm 'fp64'; there are \['fp32', 'bf16'\]"):
        report.verdict("fp64", "val_loss")
    with pytest.raises(KeyError, match=r"There is no metric 'val_acc' of the arm 'bf16'; there are \['val_loss'\]"):
        report.verdict("bf16", "val_acc")


def test_texts() -> None:
    report = make_report(2, 3)
    assert repr(report) == "PrecisionReport(['fp32', 'bf16', 'control'], seeds [0, 1, 2])"
    assert str(report) == report.to_markdown()
    assert str(report).startswith(report.recommendation)


def test_arms_are_summed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report(2, 3)
    arms = report.arms
    monkeypatch.setattr(_report, "judge", None)
    assert report.arms is arms
    assert report.recommended == "bf16"


def test_copies_and_pickles() -> None:
    report = make_report(2, 3)
    text = str(report)
    assert str(pickle.loads(pickle.dumps(report))) == str(copy.deepcopy(report)) == text
