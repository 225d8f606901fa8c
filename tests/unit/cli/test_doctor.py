"""`lightning-amp doctor`: the output and the exit status. The function is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_classes import Counter
from support.doctor_facts import machine, step, without_autocast

from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport

HEALTHY = DoctorReport(machine(), step())
SLOW = DoctorReport(machine(), step(without_autocast(10**8, Place("net.py", 3))))
CLASSES = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]


@pytest.fixture
def asked(stand_in: Any) -> Any:
    return stand_in("doctor", HEALTHY)


def test_the_machine(command: Any, asked: Any) -> None:
    asked.outcome = DoctorReport(machine())
    status, out, _ = command("--precision", "bf16", "--device", "cpu")
    assert (status, asked.calls) == (0, [{"precision": "bf16", "device": "cpu"}])
    assert out.startswith('a CPU, 2 threads\n\nUse "bf16" here: its matrix products are 4.0x as fast as in fp32')
    assert "✓ nothing-to-do (ok)" in out
    assert "\x1b[" not in out


def test_a_module(command: Any, asked: Any) -> None:
    asked.outcome = SLOW
    status, out, _ = command(*CLASSES, "--trainer.accumulate_grad_batches", "2")
    assert status == 1
    assert repr(asked.calls[0]["make_module"]) == "support.cli_classes.Net(width=3)"
    assert asked.calls[0]["trainer_kwargs"] == {"accumulate_grad_batches": 2}
    assert "! autocast-off (warning)\n  33.3 % of the FLOPs" in out
    assert "\n  -> Take that region out" in out
    assert "memory at the peak" in out


def test_the_trainers_arguments_are_made_and_the_run_is_seeded(command: Any, asked: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("seed_everything: 7\nmodel: {width: 4}\ndata: {class_path: support.cli_classes.Rows}\n")
    counter = "--trainer.callbacks+=support.cli_classes.Counter"
    assert command("--config", str(config), "--model", "support.cli_classes.Net", counter)[0] == 0
    assert type(asked.calls[0]["trainer_kwargs"]["callbacks"][0]) is Counter
    assert torch.initial_seed() == 7


@pytest.mark.usefixtures("asked")
def test_json(command: Any, tmp_path: Path) -> None:
    assert command(*CLASSES, "--json", str(tmp_path / "a.json"))[0] == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["findings"][0]["code"] == "nothing-to-do"


def test_what_the_user_raised_is_one_line(command: Any, asked: Any) -> None:
    asked.outcome = ValueError("two\nlines")
    status, _, err = command(*CLASSES)
    assert status == 2
    assert err.splitlines()[-1].endswith("two lines")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modell", "x"], "unrecognized arguments: --modell x; the options are"),
        (["--model", "support.cli_classes.Net"], "--data is missing"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_wrong_use(arguments: list[str], words: str, command: Any) -> None:
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
