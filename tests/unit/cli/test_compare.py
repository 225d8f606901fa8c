"""`lightning-amp compare`: the call of `Comparison`, which is replaced, and the exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cli_classes import Net, Rows

import lightning_amp.compare
from lightning_amp._plain_data import Table
from lightning_amp.compare import ArmRun, Claim, Verdict

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.usefixtures("in_tmp_path"),
]

BOTH = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]
MARKDOWN = "Use `fp16`.\n\n| arm | speed |\n| --- | --- |\n| fp16 | 1.8x as fast |\n"


class Report:
    """The part of a `PrecisionReport` that the command uses, and the comparison that returns it."""

    plan = SimpleNamespace(num_runs=6)

    def __init__(self, claim: Claim = "not worse", error: str | None = None, **parts: Any) -> None:
        self.of_part: list[ArmRun] = parts.get("of_part", [])
        self.missing: list[tuple[str, int]] = parts.get("missing", [])
        self.shares: list[tuple[int, int]] = []
        self.said, metrics = Verdict(claim), {"val_loss": None}
        self.arms = {
            "fp32": SimpleNamespace(errors={}, metrics=metrics),
            "fp16": SimpleNamespace(errors={} if error is None else {0: error}, metrics={} if error else metrics),
        }

    def run(self) -> Report:
        return self

    def run_part(self, part: int, num_parts: int) -> list[ArmRun]:
        self.shares.append((part, num_parts))
        return self.of_part

    def collect(self) -> tuple[Report, list[tuple[str, int]]]:
        return self, self.missing

    def verdict(self, label: str, metric: str) -> Verdict:
        assert metric in self.arms[label].metrics
        return Verdict("no margin") if label == "fp32" else self.said

    def blocks(self) -> list[str | Table]:
        return ["Use `fp16`.", Table(["arm", "speed"], [["fp16", "1.8x as fast"]])]

    def to_markdown(self) -> str:
        return MARKDOWN

    def to_json(self, path: str) -> None:
        Path(path).write_text("{}")

    def to_html(self, path: str) -> None:
        Path(path).write_text("<html>")


@pytest.fixture
def compared(stand_in: Any) -> Any:
    return stand_in("Comparison", Report(), other_process=True, owner=lightning_amp.compare)


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_the_defaults(command: Any, compared: Any) -> None:
    assert command(*BOTH) == (0, MARKDOWN, "")
    (call,) = compared.calls
    assert type(call.pop("make_module")()) is Net
    assert type(call.pop("make_data")()) is Rows
    assert call == {
        "precisions": ("fp32", "bf16", "fp16"),
        "trainer_kwargs": {},
        "seed": 0,
        "num_seeds": 1,
        "margins": None,
        "control": None,
        "dirpath": None,
        "executor": None,
        "measure_speed": "as run",
    }


def test_everything(command: Any, compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_amp.compare, "LocalDevices", dict)
    options = ["--precisions", "fp32", "fp8", "--seeds", "3", "--seed", "5", "--control", "false", "--dirpath", "kept"]
    margins = ["--margins.val_acc", "0.001", "--margins.val/x=max:0.1", "--margins.y.z", '["min", 2]']
    options += ["--devices-at-once", "4", "--measure-speed", "alone"]
    assert command(*options, *BOTH, "--trainer.max_epochs=2", *margins, "--model.lr", "0.5")[0] == 0
    (call,) = compared.calls
    assert call.pop("make_module")().hparams["lr"] == 0.5
    del call["make_data"]
    assert call == {
        "precisions": ("fp32", "fp8"),
        "trainer_kwargs": {"max_epochs": 2},
        "seed": 5,
        "num_seeds": 3,
        "margins": {"val_acc": 0.001, "val/x": ("max", 0.1), "y.z": ("min", 2.0)},
        "control": False,
        "dirpath": "kept",
        "executor": {"num": 4, "per_run": 1},
        "measure_speed": "alone",
    }


YAML = """\
fit:
  seed_everything: 7
  trainer: {precision: 16-mixed, max_epochs: 2, plugins: [{class_path: lightning_amp.AmpPrecision}]}
  model: {width: 4}
  data: {class_path: support.cli_classes.Rows}
"""


@pytest.mark.parametrize(("arguments", "seed"), [([], 7), (["--seed", "1"], 1)])
def test_a_yaml(arguments: list[str], seed: int, command: Any, compared: Any) -> None:
    Path("config.yaml").write_text(YAML)
    status, _, err = command("--config", "config.yaml", "--model", "support.cli_classes.Net", *arguments)
    assert status == 0
    assert err == (
        "lightning-amp compare: of --config config.yaml, trainer.precision, trainer.plugins is ignored: this command"
        " compares precisions\n"
    )
    (call,) = compared.calls
    assert call["make_module"]().hparams["width"] == 4
    assert (call["trainer_kwargs"], call["seed"]) == ({"max_epochs": 2}, seed)


def test_the_command_line_wins_over_the_yaml(command: Any, compared: Any) -> None:
    Path("config.yaml").write_text(YAML)
    command("--model", "support.cli_classes.Net", "--model.width", "9", "--config", "config.yaml")
    assert compared.calls[0]["make_module"]().hparams["width"] == 9


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--model is missing; name a LightningModule: `--model package.module.Class`, or a `model` in the YAML"),
        ([*BOTH, "--seeds", "x"], "argument --seeds: invalid int value: 'x'"),
        ([*BOTH, "--control", "maybe"], "argument --control: invalid choice: 'maybe' (choose from"),
        ([*BOTH, "--precisions"], "argument --precisions: expected at least one argument"),
        ([*BOTH, "--margins.a"], "--margins.a must be a number such as 0.001, or, with the better direction, max:0.1"),
        ([*BOTH, "--margins.a", "up:1"], "--margins.a must be a number such as 0.001"),
        ([*BOTH, "--margins.a", "max:x"], "--margins.a must be a number such as 0.001"),
        ([*BOTH, "--margins.a", '["max"]'], "--margins.a must be a number such as 0.001"),
        ([*BOTH, "--json", "."], "--json must be a file, got '.'"),
        ([*BOTH, "--html", "."], "--html must be a file, got '.'"),
        ([*BOTH, "--config", "nope.yaml"], "there is no file `nope.yaml`"),
        ([*BOTH, "--part", "1/3"], "--part needs --dirpath, the folder or URL in which the runs of all parts are kept"),
        ([*BOTH, "--collect"], "--collect needs --dirpath, the folder or URL"),
        ([*BOTH, "--dirpath", "x", "--part", "1/3", "--collect"], "--part trains runs and --collect judges them"),
        ([*BOTH, "--dirpath", "x", "--part", "1/3", "--measure-speed", "alone"], "--part cannot be used with"),
        ([*BOTH, "--dirpath", "x", "--part", "0/3"], "--part must be I/N, with I from 1 to N, such as 3/12; got '0/3'"),
        ([*BOTH, "--dirpath", "x", "--part", "4/3"], "--part must be I/N, with I from 1 to N, such as 3/12; got '4/3'"),
        ([*BOTH, "--dirpath", "x", "--part", "3"], "--part must be I/N, with I from 1 to N, such as 3/12; got '3'"),
        (
            [*BOTH, "--dirpath", "x", "--part", "1/3x"],
            "--part must be I/N, with I from 1 to N, such as 3/12; got '1/3x'",
        ),
        ([*BOTH, "--measure-speed", "off"], "argument --measure-speed: invalid choice: 'off' (choose from"),
        ([*BOTH, "--devices-at-once", "x"], "argument --devices-at-once: invalid int value: 'x'"),
        ([*BOTH, "--devices-at-once", "0"], "--devices-at-once: `num` must be an integer of 1 or more, got 0."),
        ([*BOTH, "--dirpath", "x", "--part", "1/3", "--html", "a.html"], "--part prints no report that --html could"),
        ([*BOTH, "--dirpath", "x", "--part", "1/3", "--json", "a.json"], "--part prints no report that --json could"),
        ([*BOTH, "--nope", "3"], "nrecognized arguments: --nope 3; there are --trainer.*, --model.*"),
        ([*BOTH, "--model.nope", "3"], "--model: Problem with given class_path 'support.cli_classes.Net': "),
    ],
)
def test_wrong_use_is_one_line_before_anything_runs(
    arguments: list[str], line: str, command: Any, compared: Any
) -> None:
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.removeprefix("lightning-amp compare: ").lstrip("uU").startswith(line)
    assert compared.calls == []


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (Report("not worse"), 0),
        (Report("undecided"), 0),
        (Report("no margin"), 0),
        (Report("worse"), 1),
        (Report(error="out of memory"), 1),
    ],
)
def test_the_exit_status(report: Report, status: int, command: Any, compared: Any) -> None:
    compared.outcome = report
    assert command(*BOTH) == (status, MARKDOWN, "")


@pytest.mark.parametrize(("kind", "per_run"), [("cuda", 2), (None, 1)])
def test_runs_on_several_devices_at_once(
    kind: str | None, per_run: int, command: Any, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run gets as many accelerators as its Trainer asks for."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(lightning_amp.compare, "LocalDevices", dict)
    command(*BOTH, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--devices-at-once", "3")
    assert compared.calls[0]["executor"] == {"num": 3, "per_run": per_run}


def test_runs_on_the_devices_of_this_machine(
    accelerator: str, command: Any, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_amp.compare, "LocalDevices", dict)
    command(*BOTH, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--devices-at-once", "3")
    assert compared.calls[0]["executor"] == {"num": 3, "per_run": 1 if accelerator == "cpu" else 2}


@pytest.mark.parametrize(("option", "value"), [("as-run", "as run"), ("alone", "alone"), ("no", False)])
def test_how_speed_is_measured(option: str, value: Any, command: Any, compared: Any) -> None:
    assert command(*BOTH, "--measure-speed", option)[0] == 0
    assert compared.calls[0]["measure_speed"] == value


@pytest.mark.parametrize(
    ("runs", "status", "out"),
    [
        ([ArmRun("fp32", 0), ArmRun("fp16", 0)], 0, "Part 2 of 3: 2 runs, 0 failed.\n"),
        (
            [ArmRun("fp32", 0), ArmRun("fp16", 1, error="out of\n memory")],
            1,
            "Part 2 of 3: 2 runs, 1 failed.\n\n- `fp16`, seed 1: out of memory\n",
        ),
        ([], 0, "Part 2 of 3 has no run, because there are fewer runs than parts.\n"),
    ],
)
def test_a_part(runs: list[ArmRun], status: int, out: str, command: Any, compared: Any) -> None:
    """It prints no report, because the runs of the other parts may be missing."""
    compared.outcome = Report(of_part=runs)
    assert command(*BOTH, "--dirpath", "kept", "--part", "2/3") == (status, out, "")
    assert compared.outcome.shares == [(2, 3)]


def test_a_collection(command: Any, compared: Any) -> None:
    assert command(*BOTH, "--dirpath", "kept", "--collect") == (0, MARKDOWN, "")


def test_a_collection_names_the_runs_that_are_missing(command: Any, compared: Any) -> None:
    compared.outcome = Report(missing=[("fp32", 1), ("fp16", 2)])
    status, out, err = command(*BOTH, "--dirpath", "kept", "--collect")
    head = "Of 6 runs, 2 are missing in `kept`:\n\n- `fp32`, seed 1\n- `fp16`, seed 2\n\n"
    assert (status, out, err) == (1, head + MARKDOWN, "")


@pytest.mark.usefixtures("compared")
def test_files(command: Any) -> None:
    assert command(*BOTH, "--json", "x.json", "--html", "x.html")[0] == 0
    assert json.loads(Path("x.json").read_text()) == {}
    assert Path("x.html").read_text() == "<html>"


@pytest.mark.usefixtures("compared")
def test_files_are_written_before_the_output(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("lightning_amp.cli._runner.write", closed)
    assert command(*BOTH, "--json", "x.json")[0] == 141
    assert Path("x.json").exists()


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("`precisions` must be\n one of [...]"), 2, "`precisions` must be one of [...]"),
        (ModuleNotFoundError("it needs scipy"), 2, "it needs scipy"),
        (PermissionError(13, "Permission denied", "kept"), 2, "[Errno 13] Permission denied: 'kept'"),
        (RuntimeError("it was started by torchrun"), 2, "it was started by torchrun"),
        (KeyError("broken"), 70, "this is an error of lightning-amp itself: KeyError: 'broken'."),
    ],
)
def test_errors(error: Exception, status: int, line: str, command: Any, compared: Any) -> None:
    compared.outcome = error
    found, out, err = command(*BOTH)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert err.startswith(f"lightning-amp compare: {line}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dirpath", "kept"], "interrupted; finished runs are in `kept`, and the same command continues from there"),
        ([], "interrupted; with `--dirpath DIR` the same command goes on where it was stopped"),
    ],
)
def test_ctrl_c(arguments: list[str], line: str, command: Any, compared: Any) -> None:
    compared.outcome = KeyboardInterrupt()
    assert command(*BOTH, *arguments) == (130, "", f"lightning-amp compare: {line}\n")


@pytest.mark.usefixtures("compared")
def test_on_a_terminal_it_is_laid_out(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = command(*BOTH)
    assert out.splitlines() == ["Use fp16.", "", "arm   speed", "fp16  1.8x as fast"]
