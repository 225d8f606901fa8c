"""`lightning-amp scale`: its output, its files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.scale_runs import scale_run

from lightning_amp.reports import ScaleHistory

FIRST, SECOND = "OO..L....O", "...." + "O" * 2 + "." * 994
POLICY = {"init_scale": 64.0, "growth_interval": 4}


@pytest.fixture(autouse=True)
def runs(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two runs and an empty one into the current directory."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    scale_run(FIRST, **POLICY).to_csv("runs/first/scale_history.csv")
    scale_run(SECOND, growth_interval=300).to_csv("runs/second/scale_history.csv")
    ScaleHistory().to_csv("runs/empty/scale_history.csv")


# -- text --------------------------------------------------------------------------------------------------------------


def test_several_side_by_side(command: Any) -> None:
    files = ["runs/first/scale_history.csv", "runs/second/", "runs/empty", "runs/first/scale_history.csv"]
    status, out, err = command("scale", *files)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "`runs/first`: 4 of 10 steps skipped, 1 of them with a non-finite loss; scale 64 -> 16"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][:5] == ["run", "steps", "skipped", "skipped gradient", "skipped loss"]
    assert rows[2:] == [
        ["runs/first", "10", "4", "3", "1", "64", "16", "16", "64"],
        ["runs/second", "1,000", "2", "2", "0", "2**16", "2**17", "2**14", "2**17"],
        ["runs/empty", "0", "0", "0", "0", "-", "-", "-", "-"],
    ]


# -- files -------------------------------------------------------------------------------------------------------------


def test_json(command: Any) -> None:
    assert command("scale", "runs/first", "runs/empty", "--json", "out/x.json")[0] == 0
    data = json.loads(Path("out/x.json").read_text())
    first, empty = data["runs"]
    assert first == {
        "run": "runs/first",
        "summary": "4 of 10 steps skipped, 1 of them with a non-finite loss; scale 64 -> 16",
        "steps": 10,
        "skipped": 4,
        "skipped_gradient": 3,
        "skipped_loss": 1,
        "first_scale": 64.0,
        "last_scale": 16.0,
        "lowest_scale": 16.0,
        "highest_scale": 64.0,
    }
    assert (empty["steps"], empty["first_scale"], empty["highest_scale"]) == (0, None, None)


def test_a_picture(command: Any) -> None:
    assert command("scale", "runs/first", "runs/second", "--plot", "x.png")[0] == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: FILE"),
        (["runs/first", "--plto", "x.png"], "unrecognized arguments: --plto x.png; did you mean --plot?; `"),
        (["nope"], "`nope` cannot be read: FileNotFoundError: "),
        (["runs"], "`runs/scale_history.csv` cannot be read: FileNotFoundError: "),
        (["memory://none"], "`memory://none/scale_history.csv` cannot be read: FileNotFoundError: "),
        (["memory://none/x.csv"], "`memory://none/x.csv` cannot be read: FileNotFoundError: "),
        (["s4://x"], "`FILE` must be a path or a URL of fsspec, got 's4://x'."),
        (["x.csv"], "`x.csv`, line 1, is not a row of a scale history (the header must be"),
        (["runs/first", "--json", "runs"], "--json must be a file, got 'runs'"),
        (["runs/first", "--plot", "x.nope"], "--plot x.nope cannot be written: Format 'nope' is not supported"),
    ],
)  # fmt: skip
@pytest.mark.few(4)
def test_wrong_use_is_one_line(arguments: list[str], line: str, command: Any) -> None:
    Path("x.csv").write_text("a,b\n1,2\n")
    status, out, err = command("scale", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"lightning-amp scale: {line}")


@pytest.mark.usefixtures("tests_are_ours")
def test_what_is_our_own_error_is_not(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> ScaleHistory:
        raise ZeroDivisionError

    monkeypatch.setattr(ScaleHistory, "from_csv", fails)
    assert command("scale", "runs/first")[0] == 70
