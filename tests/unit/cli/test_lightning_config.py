"""Reading the YAML of a LightningCLI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._lightning_config import Config, read_config

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FULL = """\
# lightning.pytorch==2.6.6
seed_everything: 7
trainer:
  precision: bf16-mixed
  plugins: null
  max_epochs: 2
model:
  class_path: models.Net
  init_args: {width: 64, lr: 1e-3}
data:
  class_path: models.Data
optimizer:
  class_path: torch.optim.SGD
ckpt_path: null
weights_only: null
"""


def read(text: str, model: str | None = None, data: str | None = None) -> Config:
    Path("config.yaml").write_text(text)
    return read_config("config.yaml", model, data)


def test_what_a_lightning_cli_saves() -> None:
    config = read(FULL)
    assert config.sections == {
        "trainer": {"max_epochs": 2},
        "model": {"class_path": "models.Net", "init_args": {"width": 64, "lr": 0.001}},
        "data": {"class_path": "models.Data"},
        "optimizer": {"class_path": "torch.optim.SGD"},
    }
    assert config.seed == 7
    assert config.dropped == ["trainer.precision"]


def test_below_fit() -> None:
    indented = "fit:\n" + "".join(f"  {line}\n" for line in FULL.splitlines())
    assert read(indented) == read(FULL)
    assert read(f"{indented}validate: {{ckpt_path: x}}\nsubcommand: fit\n") == read(FULL)


@pytest.mark.parametrize(
    ("trainer", "dropped"),
    [
        ("{precision: 16}", ["trainer.precision"]),
        ("{plugins: [{class_path: lightning_amp.AmpPrecision}]}", ["trainer.plugins"]),
        ("{precision: 16, plugins: x}", ["trainer.precision", "trainer.plugins"]),
        ("{precision: null, plugins: []}", []),
        ("{max_epochs: 1}", []),
        ("null", []),
    ],
)
def test_what_is_compared_is_left_out(trainer: str, dropped: list[str]) -> None:
    config = read(f"trainer: {trainer}")
    assert config.dropped == dropped
    assert not {"precision", "plugins"} & config.sections.get("trainer", {}).keys()


def test_without_subclass_mode_the_class_is_named_outside() -> None:
    config = read("model: {width: 3}\ndata: {rows: 8}", "models.Net", "models.Data")
    assert config.sections == {
        "model": {"class_path": "models.Net", "init_args": {"width": 3}},
        "data": {"class_path": "models.Data", "init_args": {"rows": 8}},
    }
    assert read("model: {class_path: a.B}", "models.Net").sections == {"model": {"class_path": "a.B"}}


@pytest.mark.parametrize(("value", "seed"), [("3", 3), ("true", None), ("false", None), ("null", None)])
def test_the_seed(value: str, seed: int | None) -> None:
    assert read(f"seed_everything: {value}").seed == seed


def test_a_section_in_a_file_of_its_own_is_found_beside_it() -> None:
    Path("folder").mkdir()
    Path("folder/config.yaml").write_text("model: model.yaml\ntrainer: trainer.json\n")
    Path("folder/model.yaml").write_text("class_path: models.Net\n")
    Path("folder/trainer.json").write_text('{"max_epochs": 3}')
    config = read_config("folder/config.yaml", None, None)
    assert config.sections == {"model": {"class_path": "models.Net"}, "trainer": {"max_epochs": 3}}


def test_a_url() -> None:
    MemoryFileSystem.store.clear()
    with MemoryFileSystem().open("memory://x/config.yaml", "w") as file:
        file.write("trainer: {max_epochs: 3}")
    try:
        assert read_config("memory://x/config.yaml", None, None).sections == {"trainer": {"max_epochs": 3}}
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def test_an_empty_file() -> None:
    assert read("") == Config({}, None, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "--config config.yaml must hold a mapping with trainer, model, data, optimizer, lr_scheduler"),
        ("trainer: [", "--config config.yaml cannot be read as YAML: .*line \\d"),
        ("mine: 3\ntrainer: {}", "has `mine`, which only the LightningCLI of your script knows; legal are trainer"),
        ("fit: {mine: 3}", "has `mine`"),
        ("other: 1\nfit: {}", "has `other`"),
        ("ckpt_path: x.ckpt", "has a `ckpt_path`; a comparison trains from the start: remove it"),
        ("model: {width: 3}", "`model` has no `class_path`.*pass it: `--model package.module.Class`"),
        ("data: {rows: 3}", "`data` has no `class_path`.*pass it: `--data package.module.Class`"),
        ("optimizer: {lr: 3}", "`optimizer` has no `class_path`; add it"),
        ("lr_scheduler: {gamma: 3}", "`lr_scheduler` has no `class_path`; add it"),
        ("trainer: 3", "`trainer` must be a mapping, got 3"),
        ("model: nope.yaml", "there is no file `nope.yaml`"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        read(text)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("there is no file `nope.yaml`, which --config names")):
        read_config("nope.yaml", None, None)
    with pytest.raises(UsageError, match="cannot be read as YAML: .*Is a directory"):
        read_config(str(tmp_path), None, None)
