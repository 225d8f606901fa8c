"""Factories make the objects of a command line in another process, as a LightningCLI does."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningCLI
from support import assert_same, fit, weights
from support.cli_classes import Net, Part, Rows

from lightning_amp.cli._factories import Factory, TrainerArgument, describe

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.filterwarnings("ignore:`Net.configure_optimizers` will be overridden"),  # this is intended
]

NET = {"class_path": "support.cli_classes.Net", "init_args": {"width": 3}}
WITH_PART = {
    "class_path": "support.cli_classes.Net",
    "init_args": {"width": 3, "part": {"class_path": "support.cli_classes.Part", "init_args": {"size": 7}}},
}
ROWS = {"class_path": "support.cli_classes.Rows", "init_args": {"rows": 8}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5}}
STEP = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2}}


def sent(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def test_a_module_and_its_data() -> None:
    module = sent(Factory("model", {"model": WITH_PART}))()
    assert type(module) is Net
    assert type(module.part) is Part
    assert (module.layers[0].out_features, module.part.size) == (3, 7)
    data = sent(Factory("data", {"data": ROWS}))()
    assert type(data) is Rows
    assert data.rows == 8
    assert sent(Factory("data", {"data": {"class_path": "support.cli_classes.Rows"}}))().rows == 16


def test_it_is_what_a_lightning_cli_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random draws, hyperparameters and the optimizer are the same."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = {"model": WITH_PART, "optimizer": ADAM, "lr_scheduler": STEP}
    torch.manual_seed(5)
    ours = Factory("model", config)()
    torch.manual_seed(5)
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    cli = LightningCLI(run=False, args={**config, "trainer": quiet}, seed_everything_default=False)
    assert_same(weights(ours), weights(cli.model))
    assert dict(ours.hparams) == dict(cli.model.hparams)
    (optimizer,), (schedule,) = ours.configure_optimizers()
    (theirs,), (their_schedule,) = cli.model.configure_optimizers()
    assert type(optimizer) is type(theirs) is torch.optim.Adam
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.5
    assert type(schedule) is type(their_schedule) is torch.optim.lr_scheduler.StepLR
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in ours.parameters()}


def test_the_optimizer_of_the_yaml_trains_it() -> None:
    trainer = fit(Factory("model", {"model": NET, "optimizer": ADAM})(), data=Rows())
    assert type(trainer.optimizers[0]) is torch.optim.Adam
    trainer = fit(Factory("model", {"model": NET})(), data=Rows())
    assert type(trainer.optimizers[0]) is torch.optim.SGD


def test_each_call_makes_a_new_one_and_the_seed_decides_its_weights() -> None:
    factory = Factory("model", {"model": NET})
    torch.manual_seed(1)
    first = factory()
    second = factory()
    torch.manual_seed(1)
    again = factory()
    assert first is not again
    assert_same(weights(first), weights(again))
    assert not torch.equal(first.layers[0].weight, second.layers[0].weight)


def test_another_process_finds_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from support.cli_classes import Rows\nclass Mine(Rows): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    factory = Factory("data", {"data": {"class_path": "only_here.Mine"}}, (str(tmp_path),))
    assert type(sent(factory)()).__name__ == "Mine"
    assert sys.path[0] == str(tmp_path)
    sent(factory)()
    assert sys.path.count(str(tmp_path)) == 1


def test_the_text_of_a_factory_is_the_same_wherever_it_is_run() -> None:
    """A comparison can only go on if its factories have the same text again."""
    here, there = (Factory("model", {"model": WITH_PART, "optimizer": ADAM}, (path,)) for path in ("/here", "/there"))
    net = "support.cli_classes.Net(width=3, part=support.cli_classes.Part(size=7))"
    assert repr(here) == repr(there) == f"{net}, optimizer: torch.optim.Adam(lr=0.5)"
    assert repr(Factory("data", {"data": ROWS})) == "support.cli_classes.Rows(rows=8)"
    assert "{" not in repr(Factory("data", {"data": {"class_path": "x.Y", "init_args": {"sizes": {"a": 1}}}}))
    value = [{"a": "b"}, {"class_path": "x.Y", "dict_kwargs": {"k": None}}]
    assert describe(value) == "[dict([('a', 'b')]), x.Y(k=None)]"


STOPPING = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}


def test_an_argument_of_the_trainer_is_made_where_it_is_unpickled() -> None:
    argument = TrainerArgument("callbacks", [STOPPING])
    made = sent(argument)
    assert type(made) is EarlyStopping
    assert made.monitor == "val_loss"
    assert sent(argument) is not made
    assert repr(argument) == "lightning.pytorch.callbacks.EarlyStopping(monitor='val_loss')"
    logger = sent(TrainerArgument("logger", {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}))
    assert type(logger) is L.pytorch.loggers.CSVLogger
