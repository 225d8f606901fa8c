"""The parts that all commands share."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from lightning_amp.cli._runner import Parser, Request

MODEL, DATA = "support.cli_classes.Net", "support.cli_classes.Rows"


def request(*others: str, model: str | None = MODEL, config: tuple[str, ...] = ()) -> Request:
    options = Namespace(model=model, data=DATA, config=list(config))
    return Request("lightning-amp x", options, others, Parser("lightning-amp x", ""))


def test_the_classes_and_their_arguments() -> None:
    found = request("--model.width", "3", "--trainer.max_epochs", "2").user_classes()
    assert repr(found.make_module) == f"{MODEL}(width=3)"
    assert repr(found.make_data).startswith(DATA)
    assert found.trainer_kwargs == {"max_epochs": 2}
    assert found.seed == 0


def test_a_yaml_whose_precision_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    model = f"model: {{class_path: {MODEL}, init_args: {{width: 3}}}}"
    path.write_text(f"seed_everything: 5\ntrainer: {{precision: bf16-mixed}}\n{model}\n")
    found = request(model=None, config=(str(path),)).user_classes()
    assert (found.seed, found.trainer_kwargs) == (5, {})
    said = "trainer.precision is ignored: the precision is an option of this command\n"
    assert capsys.readouterr().err.endswith(said)
