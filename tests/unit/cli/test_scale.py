"""`lightning-amp scale`: its output, its files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.scale_runs import fallen_back, scale_run

from lightning_amp.cli import main
from lightning_amp.reports import PolicyReplay, ScaleHistory

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


@pytest.fixture
def scale(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> list[str]:
        status = main(["scale", *arguments])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out.splitlines()

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> str:
        assert main(["scale", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.removeprefix("lightning-amp scale: ").rstrip("\n")

    return run


# -- text --------------------------------------------------------------------------------------------------------------


def test_one_run(scale: Any) -> None:
    lines = scale("runs/first")
    assert lines[0] == "runs/first: 4 of 10 steps skipped, 1 of them with a non-finite loss; scale 64 ->"
    assert "64 |-------" in lines
    assert "skipped: v 3 steps overflowed, x 1 step had a non-finite loss" in lines
    assert lines[-2:] == [
        "run         steps  skipped  gradient  loss  first  last  lowest  highest",
        "runs/first     10        4         3     1     64    16      16       64",
    ]
    assert all(len(line) <= 80 for line in lines)


def test_several_side_by_side(scale: Any) -> None:
    lines = scale("runs/first/scale_history.csv", "runs/second/", "runs/empty", "runs/first/scale_history.csv")
    assert lines[-4:] == [
        "run          steps  skipped  gradient  loss  first   last  lowest  highest",
        "runs/first      10        4         3     1     64     16      16       64",
        "runs/second  1,000        2         2     0  2**16  2**17   2**14    2**17",
        "runs/empty       0        0         0     0      -      -       -        -",
    ]
    assert sum(line.startswith("runs/") and ": " in line for line in lines) == 3


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_every_line_fits(width: str, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    lines = scale("runs/first", "runs/second", "--policy", "growth_interval=7")
    assert max(map(len, lines)) <= min(int(width), 100)


def test_a_replay(scale: Any) -> None:
    lines = scale("runs/first", "runs/second", "--policy", "init_scale=2**10", "growth_interval=3", "max_scale=4096")
    at = next(i for i, line in enumerate(lines) if line.split()[:5] == ["run", "skipped", "in", "the", "record"])
    assert lines[at - 4].startswith("Replayed with init_scale=1024.0, growth_factor=2.0,")
    for run, skipped, line in zip(("first", "second"), (4, 2), lines[at + 1 : at + 3], strict=True):
        history = ScaleHistory.from_csv(f"runs/{run}/scale_history.csv")
        fewest, most = history.replay(init_scale=2.0**10, growth_interval=3, max_scale=4096).num_skipped
        assert fewest < most
        assert line.split()[:5] == [f"runs/{run}", f"{fewest}", "to", f"{most}", f"{skipped}"]
    assert " ".join(lines).endswith(PolicyReplay.LIMITS)


def test_the_policy_of_the_run_says_so(scale: Any) -> None:
    text = " ".join(scale("runs/first", "runs/second", "--policy", "growth_interval=4"))
    assert "init_scale as recorded" in text
    assert "Equal to the record, step by step: `runs/first`." in text


def test_a_run_that_stops(scale: Any) -> None:
    lines = scale("runs/first", "runs/second", "--policy", "init_scale=32", "max_consecutive_skips=2")
    row = next(line for line in lines if line.startswith("runs/first ") and "%" in line)
    assert row.endswith("1 or never")
    assert any(line.endswith("stops at step") for line in lines)


# -- files -------------------------------------------------------------------------------------------------------------


def test_json(scale: Any) -> None:
    scale("runs/first", "runs/empty", "--json", "out/x.json")
    data = json.loads(Path("out/x.json").read_text())
    first, empty = data["runs"]
    assert first == {
        "run": "runs/first",
        "summary": "4 of 10 steps skipped, 1 of them with a non-finite loss; scale 64 -> 16",
        "steps": 10,
        "applied": 6,
        "skipped": 4,
        "skipped_gradient": 3,
        "skipped_loss": 1,
        "first_scale": 64.0,
        "last_scale": 16.0,
        "lowest_scale": 16.0,
        "highest_scale": 64.0,
        "replay": None,
    }
    assert (empty["steps"], empty["first_scale"], empty["highest_scale"]) == (0, None, None)
    assert data["what_a_replay_cannot_know"] is None


def test_json_of_a_replay(scale: Any) -> None:
    scale("runs/first", "--policy", "init_scale=8", "max_consecutive_skips=2", "--json", "x.json")
    data = json.loads(Path("x.json").read_text())
    replay = data["runs"][0]["replay"]
    assert replay["policy"]["init_scale"] == 8.0
    assert (replay["optimistic"]["skipped"], replay["optimistic"]["stopped_at"]) == (1, None)
    assert (replay["pessimistic"]["skipped"], replay["pessimistic"]["stopped_at"]) == (2, 1)
    assert replay["optimistic"]["decided_fraction"] == 0.7
    assert (
        replay["summary"]
        in ScaleHistory.from_csv("runs/first/scale_history.csv")
        .replay(init_scale=8.0, max_consecutive_skips=2)
        .summary()
    )
    assert data["what_a_replay_cannot_know"] == PolicyReplay.LIMITS


@pytest.mark.parametrize("arguments", [[], ["--policy", "growth_interval=3"]])
def test_a_picture(arguments: list[str], scale: Any) -> None:
    scale("runs/first", "runs/second", *arguments, "--plot", "x.png")
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_urls(scale: Any) -> None:
    history = scale_run(FIRST, **POLICY)
    history.to_csv("memory://a/scale_history.csv")
    history.to_csv("memory://b/other.csv")
    try:
        lines = scale("memory://a", "memory://b/other.csv")
        # too wide, so rows and columns are swapped
        assert lines[-9].split() == ["run", "memory://a", "memory://b/other.csv"]
        assert lines[-8].split() == ["steps", "10", "10"]
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: FILE (`lightning-amp scale --help` says more)"),
        (["nope"], "there is no file `nope`; FILE is a file that `ScaleMonitor(dirpath=...)` writes, or its folder"),
        (["runs"], "the folder `runs` has no scale_history.csv; FILE is a file"),
        (["memory://none"], "`memory://none` cannot be read: FileNotFoundError: "),
        (["s4://x"], "`FILE` must be a path or a URL of fsspec, got 's4://x'."),
        (["runs/first", "--plicy", "a=1"], "unrecognized arguments: --plicy a=1; the options are --help, --policy,"),
        (["runs/first", "--policy"], "argument --policy: expected at least one argument"),
        (["--policy", "growth_interval=3", "runs/first"], "the following arguments are required: FILE"),
        (["runs/first", "--policy", "3"], "--policy takes NAME=VALUE, got '3'; files come before it"),
        (["runs/first", "--policy", "interval=3"], "--policy: A policy has the settings init_scale, growth_factor, "),
        (["runs/first", "--policy", "growth_interval=x"], "--policy: growth_interval must be a number such as 500, "),
        (["runs/first", "--policy", "growth_interval=2.5"], "--policy: `growth_interval` must be an integer of 1 or "),
        (["runs/first", "--policy", "backoff_factor=2"], "--policy: `backoff_factor` must be a number above 0 and be"),
        (["runs/first", "--policy", "init_scale=9**999"], "--policy: init_scale must be a number"),
        (["runs/empty", "--policy", "hysteresis=2"], "--policy, `runs/empty`: There is nothing to replay: no optimiz"),
        (["runs/first", "--json", "runs"], "--json must be a file, got 'runs'"),
        (["runs/first", "--plot", "x.nope"], "--plot x.nope cannot be written: Format 'nope' is not supported"),
        (["runs/first", "--plot", "no/such/x.png"], "--plot no/such/x.png cannot be written: "),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(arguments: list[str], line: str, refused: Any) -> None:
    assert refused(*arguments).startswith(line)


def test_a_file_that_is_no_history(refused: Any) -> None:
    Path("x.csv").write_text("a,b\n1,2\n")
    assert refused("x.csv").startswith("`x.csv` is not a scale history: its header must be")
    Path("y.csv").write_text(Path("runs/first/scale_history.csv").read_text() + "11,0,nan")
    assert "`y.csv`, line " in refused("y.csv")


def test_a_store_that_fails_is_wrong_use(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception): ...

    def fails(path: str) -> ScaleHistory:
        raise NoCredentialsError("no credentials")

    monkeypatch.setattr(ScaleHistory, "from_csv", fails)
    assert refused("memory://x.csv") == "`memory://x.csv` cannot be read: NoCredentialsError: no credentials"


def test_what_is_our_own_error_is_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> ScaleHistory:
        raise ZeroDivisionError

    monkeypatch.setattr(ScaleHistory, "from_csv", fails)
    assert main(["scale", "runs/first"]) == 70


@pytest.mark.parametrize(
    ("text", "value"),
    [("500", 500), ("2**12", 4096.0), ("2**-3", 0.125), ("2.0**3", 8.0), ("0.25", 0.25), ("1e3", 1000.0), ("+7", 7)],
)
def test_numbers(text: str, value: float, scale: Any) -> None:
    name = "growth_interval" if isinstance(value, int) else "init_scale"
    scale("runs/first", "--policy", f"{name}={text}", "--json", "x.json")
    assert json.loads(Path("x.json").read_text())["runs"][0]["replay"]["policy"][name] == value


def test_a_run_that_fell_back(scale: Any, in_tmp_path: Path) -> None:
    fallen_back().to_csv("fallen.csv")
    lines = scale("fallen.csv", "--json", "out.json", "--policy", "init_scale=8", "max_consecutive_skips=6")
    assert "> bf16 from step 6 on" in "\n".join(lines)
    [run] = json.loads(Path("out.json").read_text())["runs"]
    assert run["fallbacks"] == [{"step": 6, "precision": "bf16"}]
    assert [run[f"{name}_scale"] for name in ("first", "last", "lowest", "highest")] == [8.0, 0.125, 0.125, 8.0]
    assert run["replay"]["equals_record"]
