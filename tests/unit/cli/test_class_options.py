"""What commands with a module share."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from lightning_amp.cli._class_options import user_classes

MODEL, DATA = "support.cli_classes.Net", "support.cli_classes.Rows"


def options(model: str | None = MODEL, data: str | None = DATA, *config: Path) -> Namespace:
    return Namespace(model=model, data=data, config=[str(path) for path in config])


def test_the_classes_and_their_arguments() -> None:
    found, seed = user_classes("lightning-amp x", options(), ["--model.width", "3", "--trainer.max_epochs", "2"])
    assert repr(found.make_module) == f"{MODEL}(width=3)"
    assert repr(found.make_data).startswith(DATA)
    assert found.trainer_kwargs == {"max_epochs": 2}
    assert seed is None


def test_a_yaml_whose_precision_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    model = f"model: {{class_path: {MODEL}, init_args: {{width: 3}}}}"
    path.write_text(f"seed_everything: 5\ntrainer: {{precision: bf16-mixed}}\n{model}\n")
    found, seed = user_classes("lightning-amp x", options(None, DATA, path), [])
    assert (seed, found.trainer_kwargs) == (5, {})
    said = "trainer.precision is left out: the precision is an option of this command\n"
    assert capsys.readouterr().err.endswith(said)
