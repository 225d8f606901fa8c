"""Parse the user's module, data and Trainer settings from a command line and YAML files, and check them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import final

from lightning_amp._compat._messages import is_unknown_option, short_class_names
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._factories import Factory, TrainerArgument
from lightning_amp.cli._lightning_config import COMPARED, SECTIONS

_NOISE = re.compile(
    r"does not validate against any|subtypes:|errors:|expected a <class 'nonetype'>|expected a (?:config )?path but|"
    r"given value type:|given value: (?:namespace|nestedarg)|given value: none|$",
    re.IGNORECASE,
)
"""Lines in errors of jsonargparse that do not help a user. They differ between versions."""


@final
class UserClasses(NamedTuple):
    """The user's classes, as a command line describes them.

    Attributes:
        make_module: Makes the LightningModule, in any process.
        make_data: Makes the LightningDataModule, in any process.
        trainer_kwargs: The given arguments of the Trainer; objects among them are made when they are unpickled.
        seed: `seed_everything` of the last YAML that has one; 0 if there is none.

    """

    make_module: Factory
    make_data: Factory
    trainer_kwargs: dict[str, Any]
    seed: int = 0

    def made_trainer_kwargs(self) -> dict[str, Any]:
        """Return the Trainer's arguments with their objects made in this process."""
        return pickle.loads(pickle.dumps(self.trainer_kwargs))


def import_from_here() -> tuple[str, ...]:
    """Make the current directory importable, as `python -m` does; return the folders for another process."""
    if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        return ()
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    return (here,)


def parse_user_classes(configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> UserClasses:
    """Parse and check arguments of a `LightningCLI` without making any object.

    Args:
        configs: Sections of YAML files. Later ones override earlier ones, and `arguments` override all of them.
        arguments: `--model pkg.Class --model.width 64 --data pkg.Class --trainer.max_epochs 2 ...`.

    Raises:
        UsageError: If a class cannot be imported, or does not take an argument or its value.

    """
    from jsonargparse import ActionConfigFile

    folders = import_from_here()
    for key, what in (("model", "LightningModule"), ("data", "LightningDataModule")):
        _import(key, what, _class_paths(key, configs, arguments))
    try:
        parser = LightningArgumentParser(exit_on_error=False, allow_abbrev=False)
    except ModuleNotFoundError as error:  # Lightning's message explains how to install the extra of jsonargparse
        raise UsageError(f"Lightning's own command line lacks a library: {error}") from error
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parser.add_optimizer_args()
    parser.add_lr_scheduler_args()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
            texts = [f"--config={json.dumps(config, default=str)}" for config in configs]
            parsed = parser.parse_args([*texts, *arguments], defaults=False).as_dict()
    except Exception as error:
        raise UsageError(_one_line(error, configs, arguments)) from error
    for key in ("model", "data"):
        _require_all(key, parsed[key])
    own = {key: parsed[key] for key in ("model", "optimizer", "lr_scheduler") if parsed.get(key)}
    return UserClasses(
        make_module=Factory("model", own, folders),
        make_data=Factory("data", {"data": parsed["data"]}, folders),
        trainer_kwargs=dict(_trainer_kwargs(parsed.get("trainer") or {}, folders)),
    )


def _class_paths(key: str, configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> list[str]:
    """Return all class paths that were given for a section; the last one counts."""
    written: list[str] = [config[key]["class_path"] for config in configs if key in config]
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        if option == f"--{key}":
            written.append(value if equals else following)
    return written


def _import(key: str, what: str, class_paths: Sequence[str]) -> None:
    """Import the module of a class. Errors of that import are the user's own, and jsonargparse would hide them."""
    if not class_paths:
        advice = f"name a {what}: `--{key} package.module.Class`, or a `{key}` in the YAML of --config"
        raise UsageError(f"--{key} is missing; {advice}")
    module = class_paths[-1].rpartition(".")[0]
    try:
        if module and not os.path.exists(class_paths[-1]):
            importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            return  # the module does not exist: jsonargparse reports that itself
        text = f"--{key} {class_paths[-1]}: importing `{module}` raised {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            text += "; only code below `if __name__ == '__main__':` may exit"
        raise UsageError(text) from error


def _require_all(key: str, config: Mapping[str, Any]) -> None:
    """Refuse a class whose required arguments are not all given; jsonargparse only checks arguments with a type."""
    module, _, name = config["class_path"].rpartition(".")
    given = {**config.get("init_args", {}), **config.get("dict_kwargs", {})}
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        options = " and ".join(f"--{key}.{one}" for one in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{options} {verb} required{_class_names(config['class_path'])}")


def _trainer_kwargs(given: Mapping[str, Any], folders: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Leave out defaults of the Trainer, because a saved YAML has all of its arguments."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    for name, value in given.items():
        if name in COMPARED:
            raise UsageError(f"--trainer.{name} is an option of this command: pass `--precisions` or `--precision`")
        if value == defaults.get(name, inspect.Parameter.empty):
            continue
        if isinstance(value, list):
            yield name, [TrainerArgument(name, [item], folders) if _is_class(item) else item for item in value]
        else:
            yield name, TrainerArgument(name, value, folders) if _is_class(value) else value


def _is_class(value: object) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


# -- errors ------------------------------------------------------------------------------------------------------------


def _one_line(error: Exception, configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> str:
    """Turn an error of jsonargparse, which has many lines, into one line that says what is legal."""
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    lines = [line for line in lines if not _NOISE.match(line)] or [f"{type(error).__name__}: {error}"]
    if any("class_path" in line for line in lines):  # for a list of classes or one class
        lines = [line for line in lines if line != "Expected a <class 'list'>"]
    text = "; ".join(lines).replace(":; ", ": ")
    text = re.sub(r"^Parser key \"([\w.]+)\":", r"--\1:", text)
    text = short_class_names(text)
    missing = re.match(r"--(\w+): Problem with given class_path '([\w.]+)': .* are required: (\w+)$", text)
    if missing is not None:
        return f"--{missing[1]}.{missing[3]} is required{_class_names(missing[2])}"
    return f"{text}{_legal(text, configs, arguments)}"


def _legal(text: str, configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> str:
    if is_unknown_option(text):
        unknown = re.search(r"--trainer\.(\w+)", text)
        return f"; {_other_options() if unknown is None else _trainer_names(unknown[1])}"
    unknown = re.search(r"'trainer' does not accept \w[\w ]* '(\w+)'", text)  # in a YAML
    if unknown is not None:
        return f"; {_trainer_names(unknown[1])}"
    for key in ("model", "data"):
        if text.startswith(f"--{key}: Problem with"):
            return _class_names(_class_paths(key, configs, arguments)[-1])
    return ""


def _other_options() -> str:
    sections = ", ".join(f"--{section}.*" for section in SECTIONS)
    return f"there are {sections}, and the options in `--help`"


def _trainer_names(name: str) -> str:
    names = list(inspect.signature(Trainer).parameters)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean --trainer.{near[0]}?" if near else f"the Trainer takes {', '.join(names)}"


def _class_names(class_path: str) -> str:
    """Return the names of a class's arguments as an addition to a message; empty if it cannot be imported."""
    from jsonargparse import ArgumentParser

    try:
        module, _, name = class_path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        names = ArgumentParser(exit_on_error=False).add_class_arguments(found, "x", fail_untyped=False)
    except Exception:
        return ""
    return f"; {class_path} takes {', '.join(name.removeprefix('x.') for name in names) or 'no arguments'}"
