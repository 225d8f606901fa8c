"""The user's classes on a command line and in a YAML: checked here, made in another process."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import lightning as L
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningCLI
from lightning_utilities.core.imports import RequirementCache
from support import assert_same, weights
from support.cli_classes import Counter, Net, Rows

import lightning_amp.compare
from lightning_amp.cli._classes import Factory

NET = ["--model", "support.cli_classes.Net", "--model.width", "3"]
ROWS = ["--data", "support.cli_classes.Rows"]
BOTH = [*NET, *ROWS]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.filterwarnings("ignore:`Net.configure_optimizers` will be overridden"),  # this is intended
    pytest.mark.usefixtures("in_tmp_path"),
]


@pytest.fixture
def parsed(command: Any, stand_in: Any) -> Any:
    """Return the arguments with which `lightning-amp compare` makes a comparison, as another process gets them."""
    made = stand_in("Comparison", KeyboardInterrupt(), owner=lightning_amp.compare)

    def parse(*arguments: str) -> Any:
        status, _, err = command("compare", *arguments)
        assert status == 130, err
        return pickle.loads(cloudpickle.dumps(made.calls[-1]))

    return parse


@pytest.fixture
def refused(command: Any, stand_in: Any) -> Any:
    """Return the line with which `lightning-amp compare` refuses arguments."""
    made = stand_in("Comparison", KeyboardInterrupt(), owner=lightning_amp.compare)

    def refuse(*arguments: str) -> str:
        status, out, err = command("compare", *arguments)
        assert (status, out, err.count("\n"), made.calls) == (2, "", 1, []), err
        assert len(err) < 1200
        assert not any(word in err for word in ("Union", "NoneType", "Namespace"))
        return err.removeprefix("lightning-amp compare: ").rstrip("\n")

    return refuse


def test_a_module_and_its_data(parsed: Any) -> None:
    call = parsed(*BOTH, "--model.lr", "1e-2", "--data.rows=4")
    module, data = call["make_module"](), call["make_data"]()
    assert (type(module), type(data)) == (Net, Rows)
    assert (module.hparams["width"], module.hparams["lr"], data.rows) == (3, 0.01, 4)
    assert call["trainer_kwargs"] == {}
    assert repr(call["make_module"]) == "support.cli_classes.Net(width=3, lr=0.01, part=None)"


def test_nested_classes_and_the_optimizer(parsed: Any) -> None:
    options = ["--model.part=support.cli_classes.Part", "--model.part.size=9", "--optimizer=Adam"]
    make = parsed(*BOTH, *options)["make_module"]
    assert make().part.size == 9
    assert type(make().configure_optimizers()) in (torch.optim.Adam, tuple)


def test_it_is_what_a_lightning_cli_makes(parsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random draws, hyperparameters and the optimizer are the same."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = ["--optimizer=Adam", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"]
    make = parsed(*BOTH, *options)["make_module"]
    torch.manual_seed(5)
    ours = make()
    torch.manual_seed(5)
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu"]
    cli = LightningCLI(run=False, args=[*BOTH, *options, *quiet], seed_everything_default=False)
    assert_same(weights(ours), weights(cli.model))
    assert dict(ours.hparams) == dict(cli.model.hparams)
    (optimizer,), (schedule,) = ours.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.Adam, 0.5)
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in ours.parameters()}


def test_the_trainer(parsed: Any) -> None:
    """What is its default is left out: a YAML that a LightningCLI saved has all arguments."""
    kwargs = parsed(
        *BOTH,
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.devices=auto",
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val_loss",
        "--trainer.callbacks+=support.cli_classes.Counter",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.limit_val_batches=1.0",
    )["trainer_kwargs"]
    stopping, counter = kwargs.pop("callbacks")
    assert (type(stopping), stopping.monitor, type(counter)) == (EarlyStopping, "val_loss", Counter)
    assert type(kwargs.pop("logger")) is L.pytorch.loggers.CSVLogger
    assert kwargs == {"max_epochs": 2, "accelerator": "cpu", "limit_val_batches": 1.0}
    assert isinstance(kwargs["limit_val_batches"], float)


def test_the_text_of_a_factory_is_the_same_on_every_machine() -> None:
    value = {"class_path": "x.Y", "init_args": {"width": 3}, "dict_kwargs": {"k": None}}
    assert repr(Factory("data", {"data": value})) == "x.Y(width=3, k=None)"


def test_the_current_directory_is_importable(parsed: Any, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a namespace package, such as `examples` of this repository."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(in_tmp_path))])
    (in_tmp_path / "some_folder").mkdir()
    (in_tmp_path / "some_folder" / "mine.py").write_text("from support.cli_classes import Rows\nclass D(Rows): ...\n")
    assert type(parsed(*NET, "--data", "some_folder.mine.D")["make_data"]()).__module__ == "some_folder.mine"
    assert sys.path.count(str(in_tmp_path)) == 1


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["the following arguments are required: --data, --model"]),
        (NET, ["the following arguments are required: --data"]),
        ([*BOTH, "--sedes", "3"], ["--sedes 3; did you mean --seeds?"]),
        ([*BOTH, "--zzz", "3"], ["--zzz 3; `--help` lists the options"]),
        ([*BOTH, "stray"], ["unrecognized arguments: stray"]),
        ([*BOTH, "--model.widht", "3"], ["--model: ", "widht", "; did you mean width?; it takes width, lr, part"]),
        ([*BOTH, "--model.part=support.cli_classes.Part", "--model.part.sise=3"], ["sise", "; did you mean size?"]),
        ([*BOTH, "--model.width", "wide"], ["--model: ", "width", "Expected a int", "wide"]),
        ([*BOTH[:2], *ROWS], ["--model: ", "required: width"]),
        ([*BOTH, "--trainer.max_epochs=x"], ["--trainer.max_epochs: Expected a int"]),
        ([*BOTH, "--trainer.max_epoch=2"], ["--trainer.max_epoch=2; did you mean --trainer.max_epochs?"]),
        ([*BOTH, "--trainer.callbacks=EarlyStopping"], ["--trainer.callbacks", "EarlyStopping", "monitor"]),
        (["--model", "support.cli_classes.Nett", *ROWS], ["--model: ", "has no attribute 'Nett'"]),
        (["--model", "no_such_package.Net", *ROWS], ["--model: ", "No module named 'no_such_package'"]),
        (["--model", "support.cli_classes.Rows", *ROWS], ["--model: ", "subclass of LightningModule"]),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_with_the_nearest_name(arguments: list[str], parts: list[str], refused: Any) -> None:
    text = refused(*arguments)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "--model: two; lines"),
        ("def f(:", "invalid syntax (broken.py, line 1)"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("import sys; sys.exit(1)", "importing a class ended with `sys.exit(1)`"),
    ],
)
def test_a_module_that_cannot_be_imported(code: str, message: str, refused: Any) -> None:
    Path("broken.py").write_text(code)
    sys.modules.pop("broken", None)
    assert message in refused("--model", "broken.Net", *ROWS)


def test_an_extra_that_lightnings_command_line_lacks(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version of jsonargparse needs jsonnet."""
    lacks = RequirementCache("jsonargparse[no-such-extra]>=1")
    lacks.available, lacks.message = False, "Requirement 'jsonargparse[jsonnet]' not met. Run `pip install it`"
    monkeypatch.setattr("lightning.pytorch.cli._JSONARGPARSE_SIGNATURES_AVAILABLE", lacks)
    assert refused(*BOTH).startswith("Lightning's own command line lacks a library: Requirement 'jsonarg")


# -- YAML --------------------------------------------------------------------------------------------------------------

YAML = """\
# lightning.pytorch==2.6.6
seed_everything: 7
trainer:
  precision: bf16-mixed
  plugins: null
  max_epochs: 2
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: a}
model:
  class_path: support.cli_classes.Net
  init_args: {width: 64, lr: 1e-3}
data:
  class_path: support.cli_classes.Rows
optimizer:
  class_path: torch.optim.SGD
ckpt_path: null
weights_only: null
"""


@pytest.mark.parametrize("text", [YAML, "fit:\n" + "".join(f"  {line}\n" for line in YAML.splitlines())])
def test_a_yaml(text: str, parsed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(text)
    call = parsed("--config", "config.yaml", "--trainer.max_epochs=3", "--data.rows=8")
    module = call["make_module"]()
    assert (module.hparams["width"], module.hparams["lr"], call["make_data"]().rows) == (64, 0.001, 8)
    assert (call["seed"], call["trainer_kwargs"]["max_epochs"]) == (7, 3)
    assert type(call["trainer_kwargs"]["callbacks"][0]) is EarlyStopping
    assert parsed("--config=config.yaml", "--seed", "1")["seed"] == 1


def test_the_precision_of_a_yaml_is_ignored_and_said(command: Any, stand_in: Any) -> None:
    stand_in("Comparison", KeyboardInterrupt(), owner=lightning_amp.compare)
    Path("config.yaml").write_text(YAML)
    err = command("compare", "--config", "config.yaml")[2]
    assert "of --config config.yaml, trainer.precision is ignored: this command sets the precision" in err
    Path("config.yaml").write_text("ckpt_path: x.ckpt")
    err = command("compare", *BOTH, "--config", "config.yaml")[2]
    assert "of --config config.yaml, ckpt_path is ignored" in err


def test_later_files_win_and_a_class_may_be_named_outside(parsed: Any) -> None:
    Path("a.yaml").write_text("model: {width: 3}\ndata: {rows: 8}\ntrainer: {max_epochs: 1}\nseed_everything: true")
    Path("b.yaml").write_text("trainer: {max_epochs: 9}")
    call = parsed(*BOTH[:2], *ROWS, "--config", "a.yaml", "--config", "b.yaml")
    assert (call["make_module"]().hparams["width"], call["make_data"]().rows, call["seed"]) == (3, 8, 0)
    assert call["trainer_kwargs"] == {"max_epochs": 9}


def test_a_url(parsed: Any) -> None:
    Path("config.yaml").write_text("model: {class_path: support.cli_classes.Net, init_args: {width: 5}}\n")
    MemoryFileSystem.store.clear()
    with MemoryFileSystem().open("memory://x/config.yaml", "w") as file:
        file.write("trainer: {max_epochs: 3}")
    try:
        call = parsed("--config", "config.yaml", "--config", "memory://x/config.yaml", *ROWS)
        assert (call["make_module"]().hparams["width"], call["trainer_kwargs"]) == (5, {"max_epochs": 3})
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "; it must be a YAML with trainer, model, data, optimizer, lr_scheduler"),
        ("trainer: [", "--config config.yaml cannot be read: ParserError: "),
        ("mine: 3\ntrainer: {}", "does not accept option 'mine'"),
        ("fit: {mine: 3}", "does not accept option 'mine'"),
        ("model: {width: 3}", "--model: "),
        ("optimizer: {lr: 3}", "--optimizer: "),
        ("trainer: 3", "must be a YAML with trainer"),
        ("model: nope.yaml", "--model: "),
        ("trainer: {max_epoch: 4}", "'trainer.max_epoch'; did you mean --trainer.max_epochs?"),
        ("model: {class_path: support.cli_classes.Net, init_args: {width: 3, depth: 4}}", "it takes width, lr, part"),
    ],
)
def test_a_yaml_that_cannot_be_used(text: str, message: str, refused: Any) -> None:
    Path("config.yaml").write_text(text)
    arguments = [] if text.startswith("model") else BOTH
    assert message in refused("--config", "config.yaml", *ROWS, *arguments)
