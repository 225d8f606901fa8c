"""`lightning-amp doctor`: what is printed, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_classes import Counter
from support.doctor_facts import machine, step, without_autocast

import lightning_amp
from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport
from lightning_amp.cli import main

HEALTHY = DoctorReport(machine(), step())
SLOW = DoctorReport(machine(), step(without_autocast(10**8, Place("net.py", 3))))
CLASSES = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the function was asked; its `report` is what it returns, or raises."""
    seen: dict[str, Any] = {"report": HEALTHY}

    def doctor(*args: Any, **kwargs: Any) -> Any:
        seen.update(args=args, kwargs=kwargs)
        if isinstance(seen["report"], BaseException):
            raise seen["report"]
        return seen["report"]

    monkeypatch.setattr(lightning_amp, "doctor", doctor, raising=False)
    return seen


def test_the_machine(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["report"] = DoctorReport(machine())
    assert main(["doctor", "--precision", "bf16", "--device", "cpu"]) == 0
    assert asked["args"] == ()
    assert asked["kwargs"] == {"precision": "bf16", "device": "cpu"}
    out = capsys.readouterr().out
    assert out.startswith("a CPU, 2 threads\n\n· emulated-precision (note)\n  fp16 is emulated here")
    assert "✓ precision (ok)" in out
    assert "\x1b[" not in out


def test_a_module(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["report"] = SLOW
    assert main(["doctor", *CLASSES, "--trainer.accumulate_grad_batches", "2"]) == 1
    assert repr(asked["args"][0]) == "support.cli_classes.Net(width=3)"
    assert asked["kwargs"]["trainer_kwargs"] == {"accumulate_grad_batches": 2}
    out = capsys.readouterr().out
    assert "! autocast-off (warning)\n  33.3 % of the FLOPs" in out
    assert "\n  -> Take that region out" in out
    assert "memory at the peak" in out


def test_the_trainers_arguments_are_made_and_the_run_is_seeded(asked: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("seed_everything: 7\nmodel: {width: 4}\ndata: {class_path: support.cli_classes.Rows}\n")
    counter = "--trainer.callbacks+=support.cli_classes.Counter"
    assert main(["doctor", "--config", str(config), "--model", "support.cli_classes.Net", counter]) == 0
    assert type(asked["kwargs"]["trainer_kwargs"]["callbacks"][0]) is Counter
    assert torch.initial_seed() == 7


def test_json(asked: dict[str, Any], tmp_path: Path) -> None:
    assert main(["doctor", *CLASSES, "--json", str(tmp_path / "a.json")]) == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["findings"][0]["code"] == "nothing-to-do"


def test_what_the_user_raised_is_one_line(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["report"] = ValueError("two\nlines")
    assert main(["doctor", *CLASSES]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("two lines")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modell", "x"], "unrecognized arguments: --modell x; the options are"),
        (["--model", "support.cli_classes.Net"], "--data is missing"),
        (["--json", "."], "--json must be a file"),
        ([*CLASSES, "--model.widht", "3"], "'widht'"),
    ],
)
def test_wrong_use(asked: dict[str, Any], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
