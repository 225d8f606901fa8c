"""The user's classes on a command line: checked here, made in another process."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache
from support.cli_classes import Counter, Net, Rows

from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._user_classes import UserClasses, import_from_here, parse_user_classes

NET = ["--model", "support.cli_classes.Net", "--model.width", "3"]
ROWS = ["--data", "support.cli_classes.Rows"]
BOTH = [*NET, *ROWS]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from jsonargparse, about Lightning
    pytest.mark.filterwarnings("ignore:`Net.configure_optimizers` will be overridden"),  # this is intended
]


def parsed(*arguments: str, configs: list[dict[str, Any]] | None = None) -> UserClasses:
    return parse_user_classes(configs or [], arguments)


def sent(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def test_a_module_and_its_data() -> None:
    user = parsed(*BOTH, "--model.lr", "1e-2", "--data.rows=4")
    module, data = sent(user.make_module)(), sent(user.make_data)()
    assert type(module) is Net
    assert type(data) is Rows
    assert (module.hparams["width"], module.hparams["lr"], data.rows) == (3, 0.01, 4)
    assert user.trainer_kwargs == {}


class Untyped(Net):
    def __init__(self, width, depth=1, *, lr) -> None:  # type: ignore[no-untyped-def]
        super().__init__(width, lr)


UNTYPED = f"{__name__}.Untyped"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model.width and --model.lr are required; .*Untyped takes width, depth, lr$"),
        (["--model.width=3"], "^--model.lr is required; .*Untyped takes width, depth, lr$"),
    ],
)
def test_a_required_argument_without_a_type(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parsed("--model", UNTYPED, *arguments, *ROWS)
    config = {"model": {"class_path": UNTYPED, "init_args": dict(a[8:].split("=") for a in arguments)}}
    with pytest.raises(UsageError, match=says):
        parsed(*ROWS, configs=[config])


def test_what_is_given_without_a_type_may_be_nothing() -> None:
    user = parsed("--model", UNTYPED, "--model.width=3", "--model.lr=null", *ROWS)
    assert sent(user.make_module)().hparams["lr"] is None


def test_an_extra_that_lightnings_command_line_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version of jsonargparse needs jsonnet."""
    lacks = RequirementCache("jsonargparse[no-such-extra]>=1")
    lacks.available, lacks.message = False, "Requirement 'jsonargparse[jsonnet]' not met. Run `pip install it`"
    monkeypatch.setattr("lightning.pytorch.cli._JSONARGPARSE_SIGNATURES_AVAILABLE", lacks)
    with pytest.raises(UsageError, match=r"Lightning's own command line lacks a library: Requirement 'jsonarg"):
        parsed(*BOTH)


def test_nested_classes_and_the_optimizer() -> None:
    user = parsed(*BOTH, "--model.part=support.cli_classes.Part", "--model.part.size=9", "--optimizer=Adam")
    assert sent(user.make_module)().part.size == 9
    assert repr(user.make_module).endswith("part=support.cli_classes.Part(size=9)), optimizer: torch.optim.Adam()")


def test_the_trainer() -> None:
    user = parsed(
        *BOTH,
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val_loss",
        "--trainer.callbacks+=support.cli_classes.Counter",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.limit_val_batches=1.0",
    )
    kwargs = sent(user.trainer_kwargs)
    stopping, counter = kwargs.pop("callbacks")
    assert (type(stopping), stopping.monitor, type(counter)) == (EarlyStopping, "val_loss", Counter)
    assert type(kwargs.pop("logger")) is L.pytorch.loggers.CSVLogger
    assert kwargs == {"max_epochs": 2, "accelerator": "cpu", "limit_val_batches": 1.0}
    assert isinstance(kwargs["limit_val_batches"], float)


def test_what_is_the_default_of_the_trainer_is_left_out() -> None:
    """A YAML that a LightningCLI saved has all arguments of the Trainer."""
    config = {"trainer": {"accelerator": "auto", "devices": "auto", "gradient_clip_val": None, "max_epochs": 3}}
    assert parsed(*BOTH, configs=[config]).trainer_kwargs == {"max_epochs": 3}


CONFIG = {
    "trainer": {
        "max_epochs": 1,
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "a"}}],
    },
    "model": {"class_path": "support.cli_classes.Net", "init_args": {"width": 5, "lr": 0.25}},
    "data": {"class_path": "support.cli_classes.Rows", "init_args": {"rows": 4}},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
}


def test_a_yaml() -> None:
    user = parsed(configs=[CONFIG])
    assert repr(user.make_module) == "support.cli_classes.Net(width=5, lr=0.25), optimizer: torch.optim.SGD(lr=0.5)"
    assert repr(user.make_data) == "support.cli_classes.Rows(rows=4)"
    (checkpoint,) = sent(user.trainer_kwargs)["callbacks"]
    assert type(checkpoint) is ModelCheckpoint


def test_the_command_line_wins_and_later_files_win() -> None:
    other = {"trainer": {"max_epochs": 9}, "data": {"class_path": "support.cli_classes.Rows", "init_args": {"rows": 8}}}
    user = parsed("--model.width", "6", configs=[CONFIG, other])
    assert repr(user.make_module).startswith("support.cli_classes.Net(width=6, lr=0.25)")
    assert repr(user.make_data) == "support.cli_classes.Rows(rows=8)"
    assert user.trainer_kwargs["max_epochs"] == 9


def test_the_current_directory_is_importable(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a namespace package, such as `examples` of this repository."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(in_tmp_path))])
    (in_tmp_path / "some_folder").mkdir()
    (in_tmp_path / "some_folder" / "mine.py").write_text("from support.cli_classes import Rows\nclass D(Rows): ...\n")
    user = parsed(*NET, "--data", "some_folder.mine.D")
    assert sys.path[0] == str(in_tmp_path)
    sys.path.remove(str(in_tmp_path))
    assert type(sent(user.make_data)()).__module__ == "some_folder.mine"
    assert sys.path[0] == str(in_tmp_path)
    import_from_here()
    assert sys.path.count(str(in_tmp_path)) == 1


def one_line(*arguments: str, configs: list[dict[str, Any]] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        parsed(*arguments, configs=configs)
    text = str(caught.value)
    assert len(text) < 1200
    assert "\n" not in text
    assert "Union" not in text
    assert "NoneType" not in text
    return text


TAKES = "; support.cli_classes.Net takes width, lr, part"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (NET, ["--data is missing; name a LightningDataModule: `--data package.module.Class`, or a `data` in the "]),
        (ROWS, ["--model is missing; name a LightningModule"]),
        ([*BOTH, "--model.widht", "3"], ["--model: ", "widht", TAKES]),
        ([*BOTH, "--model.width", "wide"], ["--model: ", "width", "Expected a int", "wide", TAKES]),
        ([*BOTH[:2], *ROWS], ["--model", "width", "required", TAKES]),
        ([*BOTH, "--data.row=3"], ["--data: ", "row", "; support.cli_classes.Rows takes rows"]),
        ([*BOTH, "--model.part=support.cli_classes.Part", "--model.part.sise=3"], ["--model: ", "sise", "Part"]),
        ([*BOTH, "--trainer.max_epochs=x"], ["--trainer.max_epochs: Expected a int", "x"]),
        ([*BOTH, "--trainer.max_epoch=2"], ["--trainer.max_epoch=2; did you mean --trainer.max_epochs?"]),
        ([*BOTH, "--trainer.zzz=2"], ["--trainer.zzz=2; the Trainer takes accelerator, strategy, devices, "]),
        ([*BOTH, "--trainer.precision=16"], ["--trainer.precision is an option of this command: pass `--precisions`"]),
        ([*BOTH, "--trainer.callbacks=EarlyStopping"], ["--trainer.callbacks: ", "EarlyStopping", "monitor"]),
        ([*BOTH, "--foo", "3"], ["--foo 3; there are --trainer.*, --model.*, --data.*, --optimizer.*"]),
        ([*BOTH, "stray"], ["stray; there are"]),
        (["--model", "support.cli_classes.Nett", *ROWS], ["--model: ", "has no attribute 'Nett'"]),
        (["--model", "no_such_package.Net", *ROWS], ["--model: ", "No module named 'no_such_package'"]),
        (["--model", "support.cli_classes.Rows", *ROWS], ["--model: ", "to a subclass of LightningModule"]),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_that_says_what_is_legal(arguments: list[str], parts: list[str]) -> None:
    text = one_line(*arguments)
    assert [part for part in parts if part not in text] == [], text


def test_wrong_use_in_a_yaml() -> None:
    model = {"class_path": "support.cli_classes.Net", "init_args": {"width": 3, "depth": 4}}
    assert one_line(configs=[CONFIG | {"model": model}]).endswith(TAKES)
    trainer = {"max_epoch": 4}
    assert one_line(configs=[CONFIG | {"trainer": trainer}]).endswith("did you mean --trainer.max_epochs?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "importing `broken` raised RuntimeError: two"),
        ("def f(:", "importing `broken` raised SyntaxError: "),
        ("import no_such_thing", "importing `broken` raised ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import sys; sys.exit(1)", "raised SystemExit: 1; only code below `if __name__ == '__main__':` may exit"),
    ],
)
def test_what_a_module_raises_is_said_to_be_its_own(
    text: str, message: str, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (in_tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parsed("--model", "broken.Net", *ROWS)
    assert str(caught.value).startswith("--model broken.Net: importing")


def test_ctrl_c_while_importing_is_not_wrong_use(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (in_tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        parsed("--model", "slow.Net", *ROWS)


def test_safe_path_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flags:
        safe_path = True

    monkeypatch.setattr(sys, "flags", Flags())
    before = list(sys.path)
    assert import_from_here() == ()
    assert sys.path == before
