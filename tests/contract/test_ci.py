"""The Makefile, `.ci/run` and the workflow agree on what is run, and nothing is left out everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import fabric, promises

REPOSITORY = Path(__file__).parents[2]


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_each_stage_is_run_by_default_and_on_github() -> None:
    script = text_of(".ci/run")
    stages = re.findall(r"^    ([a-z]+)\) \w+ ;;$", script, re.MULTILINE)
    assert "test" in stages
    assert re.search(r"\|\| stages=\((.*)\)$", script, re.MULTILINE)[1].split() == stages
    assert re.search(r"some of: (.*)$", script, re.MULTILINE)[1].split() == stages
    assert re.search(r"legal are (.*)\" >&2$", script, re.MULTILINE)[1].split(", ") == stages
    matrix = re.search(r"stage: \[(.*)\]$", text_of(".github/workflows/tests.yml"), re.MULTILINE)
    assert matrix[1].split(", ") == stages


def test_only_make_test_leaves_out_what_is_slow() -> None:
    """Of `test`, `test-all`, `test-device`, `approve`, `lint` and `projects`, in this order."""
    lines = [line for line in text_of("Makefile").splitlines() if "-m pytest" in line]
    assert ["not slow" in line for line in lines] == [True, False, True, False, False, False]
    assert "make test-all " in text_of(".ci/run")
    assert "not slow" not in text_of("pyproject.toml") + text_of("tests/versions/__main__.py")


def test_no_promise_is_slow() -> None:
    """Only runs with Lightning's own plugin are, which are marked in one place, and three that take real time."""
    files = [*(REPOSITORY / "tests" / "promises").rglob("*.py"), REPOSITORY / "tests" / "support" / "promises.py"]
    assert len(files) > 20
    slow = {file.name: file.read_text(encoding="utf-8").count("mark.slow") for file in files}
    wanted = {"promises.py": 1, "test_doctor.py": 2, "test_metric_comparison_bit_identity.py": 1}
    assert {name: count for name, count in slow.items() if count} == wanted

    def test(plugins: Any) -> None: ...

    for promise in (promises.promise, fabric.promise):
        cases = vars(promise(1, stock="")(test))["pytestmark"][0].args[1]
        assert {case.values[0].ours for case in cases if pytest.mark.slow in case.marks} == {False}
        assert {case.values[0].ours for case in cases if pytest.mark.slow not in case.marks} == {True}
