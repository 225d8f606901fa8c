"""`lightning-amp fp32-modules`: the call of `find_fp32_modules`, the printed rules, and the exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_classes import Counter, Net, Rows

from lightning_amp.tune import Fp32Rules, NothingHelps

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.usefixtures("in_tmp_path"),
]

BOTH = ["--model", "support.cli_classes.Net", "--model.width", "3", "--data", "support.cli_classes.Rows"]
FOUND = Fp32Rules(
    ["head", "blocks.*.norm"],
    cost=1.08,
    message="'head', 'blocks.*.norm' in fp32: fine.",
    tried=12,
    gradient_errors=(float("inf"), 0.0123),
    metric_errors={"val_loss": (0.5, 0.001)},
)
NOTHING = Fp32Rules(
    [], cost=1.0, message="Nothing needs fp32.", tried=1, gradient_errors=(0.001, 0.001), metric_errors={}
)


@pytest.fixture
def searched(stand_in: Any) -> Any:
    return stand_in("find_fp32_modules", FOUND)


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_the_defaults(command: Any, searched: Any) -> None:
    status, out, err = command(*BOTH, "--tolerance", "0.05")
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "'head', 'blocks.*.norm' in fp32: fine.",
        "",
        'AmpPrecision("fp16", fp32_modules=["head", "blocks.*.norm"])',
        "",
        "relative error     in fp16  with these in fp32",
        "gradients       not finite              1.23 %",
        "val_loss              50 %               0.1 %",
    ]
    (call,) = searched.calls
    assert type(call.pop("make_module")()) is Net
    assert type(call.pop("make_data")()) is Rows
    assert call == {"precision": "fp16", "tolerance": 0.05, "trainer_kwargs": {}}


@pytest.mark.parametrize("option", ["--precision", "--precisions"])
def test_a_precision_and_arguments_of_the_trainer(option: str, command: Any, searched: Any) -> None:
    trainer = ["--trainer.max_epochs", "2", "--trainer.callbacks+=support.cli_classes.Counter"]
    command(*BOTH, "--tolerance=1e-2", option, "bf16", *trainer)
    (call,) = searched.calls
    assert (call["precision"], call["tolerance"]) == ("bf16", 0.01)
    assert call["trainer_kwargs"]["max_epochs"] == 2
    assert type(call["trainer_kwargs"]["callbacks"][0]) is Counter  # the object, not its description


def test_the_seed_of_a_yaml(command: Any, searched: Any) -> None:
    yaml = "seed_everything: 7\nmodel: {width: 4}\ndata: {class_path: support.cli_classes.Rows}\n"
    Path("config.yaml").write_text(yaml)
    command("--config", "config.yaml", "--model", "support.cli_classes.Net", "--tolerance", "0.05")
    assert torch.initial_seed() == 7
    assert searched.calls[0]["make_module"]().hparams["width"] == 4


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_nothing_is_needed(command: Any, searched: Any) -> None:
    searched.outcome = NOTHING
    assert command(*BOTH, "--tolerance", "0.05", "--json", "out.json") == (0, "Nothing needs fp32.\n", "")
    assert json.loads(Path("out.json").read_text())["rules"] == []


def test_json(command: Any, searched: Any) -> None:
    command(*BOTH, "--tolerance", "0.05", "--json", "out.json")
    assert json.loads(Path("out.json").read_text()) == {
        "precision": "fp16",
        "tolerance": 0.05,
        "rules": ["head", "blocks.*.norm"],
        "message": FOUND.message,
        "cost": 1.08,
        "tried": 12,
        "gradient_errors": [None, 0.0123],
        "metric_errors": {"val_loss": [0.5, 0.001]},
    }


def test_nothing_helps(command: Any, searched: Any) -> None:
    searched.outcome = NothingHelps("No precision can help.")
    assert command(*BOTH, "--tolerance", "0.05", "--json", "out.json") == (1, "No precision can help.\n", "")
    assert json.loads(Path("out.json").read_text())["rules"] is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*BOTH], "the following arguments are required: --tolerance"),
        ([*BOTH, "--tolerance", "x"], "--tolerance: invalid float value: 'x'"),
        (
            [*BOTH, "--tolerance", "1", "--precisions", "fp16", "bf16"],
            "must be exactly one here, got fp16 bf16",
        ),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], text: str, command: Any, searched: Any) -> None:
    status, out, err = command(*arguments)
    assert (status, out, searched.calls) == (2, "", [])
    assert err.startswith("lightning-amp fp32-modules: ")
    assert text in err
    assert err.count("\n") == 1


# -- for real ----------------------------------------------------------------------------------------------------------

MODELS = """
import torch
from support.cli_classes import Net


class Healthy(Net):
    def __init__(self) -> None:
        super().__init__(4, lr=1e-4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Raises(Healthy):
    def training_step(self, batch, batch_idx):
        raise KeyError("no such column")


class Refuses(Healthy):
    def __init__(self) -> None:
        raise OSError("no such file")

"""


@pytest.fixture
def models(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fp32_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "fp32_models", raising=False)


@pytest.mark.usefixtures("models")
def test_a_healthy_module(command: Any) -> None:
    data = ["--data", "support.cli_classes.Rows", "--trainer.accelerator", "cpu"]
    status, out, err = command("--model", "fp32_models.Healthy", *data, "--tolerance", "0.05")
    assert (status, err) == (0, "")
    assert out.startswith("Nothing needs fp32: in 'fp16' gradients differ by")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("model", "tolerance", "text"),
    [
        ("Raises", "0.05", "KeyError in fp32_models.py:16 (`training_step`): 'no such column'"),
        ("Refuses", "0.05", "OSError in fp32_models.py:21 (`__init__`): no such file"),
        ("Healthy", "-1", "`tolerance` must be a finite number above 0, such as 0.05, got -1.0."),
    ],
)
def test_what_the_user_got_wrong(model: str, tolerance: str, text: str, command: Any) -> None:
    data = ["--data", "support.cli_classes.Rows", "--trainer.accelerator", "cpu"]
    status, out, err = command("--model", f"fp32_models.{model}", *data, "--tolerance", tolerance)
    assert (status, out) == (2, "")
    assert err == f"lightning-amp fp32-modules: {text}\n"
