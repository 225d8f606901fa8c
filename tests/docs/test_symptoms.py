"""The guide by symptom shows what the callbacks really print."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support import warm

from lightning_amp._text import exact

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- ([\w-]+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = (ROOT / "docs" / "guide" / "symptoms.md").read_text(encoding="utf-8")


def without_numbers(text: str) -> str:
    """They may differ in their last digits from one CPU to the next."""
    text = re.sub(r"2\*\*-?\d+|[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?%?", "#", text)
    return re.sub(r"\s+", " ", text).replace("-#", "#")  # lines break elsewhere, too


@pytest.mark.slow
def test_output_in_the_guide_is_real() -> None:
    """One process for all: they print one after the other, each below a line with its name."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = warm.run_script(
        Path(__file__).with_name("symptoms_script.py"),
        "--fast",
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = dict(re.findall(r"^--- ([\w-]+): (.*?)(?=^--- |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    assert printed.keys() == {name for name, _ in BLOCK.findall(GUIDE)}
    for name, block in BLOCK.findall(GUIDE):
        assert without_numbers(block) in without_numbers(printed[name]), printed[name]


def test_scales_are_spelled_as_they_are_printed() -> None:
    """Which the comparison above cannot see."""
    spelled = re.findall(r"(?:scale|scale of|->) (\d+)\b(?!\*)", "".join(block for _, block in BLOCK.findall(GUIDE)))
    assert spelled
    assert [number for number in spelled if number != exact(float(number))] == []


def test_every_symptom_is_in_the_guide() -> None:
    sections = re.findall(r"^## (.*)$", GUIDE, re.MULTILINE)
    assert len(sections) == 7  # the last is about errors of torch
    assert {name for name, _ in BLOCK.findall(GUIDE)} == {
        "nan-loss", "falling-scale", "many-skips", "accuracy", "speed", "memory",
    }  # fmt: skip
    assert GUIDE.count("```text") == len(BLOCK.findall(GUIDE))
