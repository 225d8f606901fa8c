"""The user's module, data and Trainer on a command line, as in a `LightningCLI`, and the YAML of one."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import final, override

from lightning_amp._files import open_text
from lightning_amp._text import named
from lightning_amp.cli._errors import UsageError, usage_error
from lightning_amp.cli._output import note

_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
_IGNORED = ("seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
"""Keys of a YAML of a LightningCLI besides its sections."""


def class_parser(**settings: Any) -> LightningArgumentParser:
    """Return a parser that also takes the arguments of the user's classes, such as `--model.width 64`."""
    from jsonargparse import ActionConfigFile

    if not getattr(sys.flags, "safe_path", False) and os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        parser = LightningArgumentParser(exit_on_error=False, **settings)
    except ModuleNotFoundError as error:  # Lightning's message explains how to install the extra of jsonargparse
        raise UsageError(f"Lightning's own command line lacks a library: {error}") from error
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parser.add_optimizer_args()
    parser.add_lr_scheduler_args()
    return parser


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which each YAML of a LightningCLI stands at the front, as jsonargparse reads it."""
    configs, others, left = list[str](), list[str](), iter(arguments)
    for argument in left:
        option, equals, value = argument.partition("=")
        if option == "--config":
            configs.append(value if equals else next(left, ""))
        else:
            others.append(argument)
    classes = {key: _given(key, others) for key in ("model", "data")}
    found = [_read(path, classes) for path in configs]
    for key, given in classes.items():
        path = given or next((config[key]["class_path"] for config in reversed(found) if key in config), "")
        _import(f"--{key} {path}", path.rpartition(".")[0])
    return [*(f"--config={json.dumps(config, default=str)}" for config in found), *others]


def user_classes(options: Any) -> dict[str, Any]:
    """Return what our functions take: factories for the classes among parsed options, and the Trainer's arguments."""
    options = options.as_dict()
    _require_all("model", options["model"])
    _require_all("data", options["data"])
    own = {key: options[key] for key in ("model", "optimizer", "lr_scheduler") if options.get(key)}
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    given = {name: value for name, value in options["trainer"].items() if value != defaults.get(name)}
    for name in ("precision", "plugins"):
        if name in given:
            raise UsageError(f"--trainer.{name} is an option of this command: pass `--precisions` or `--precision`")
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
        made = parser.instantiate_classes(parser.parse_object({"trainer": given}))["trainer"]
    factories = {"make_module": Factory("model", own), "make_data": Factory("data", {"data": options["data"]})}
    return {**factories, "trainer_kwargs": {name: made[name] for name in given}}


def _import(option: str, module: str) -> None:
    """Import the module of a class. Errors of that import are the user's own, and jsonargparse would hide them."""
    try:
        if module:
            importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            return  # the module does not exist: jsonargparse reports that itself
        text = usage_error(error) if isinstance(error, Exception) else f"it ended with `sys.exit({error.code!r})`"
        raise UsageError(f"{option} cannot be imported: {text or error}") from error


def _given(key: str, arguments: Sequence[str]) -> str | None:
    """Return the class path that an option gives."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"--{key}="):
            return argument.partition("=")[2]
        if argument == f"--{key}":
            return next(iter(arguments[i + 1 : i + 2]), None)
    return None


def _require_all(key: str, config: Mapping[str, Any]) -> None:
    """Refuse a class whose arguments without a type are not all given; jsonargparse only checks the others."""
    module, _, name = config["class_path"].rpartition(".")
    given = {**config.get("init_args", {}), **config.get("dict_kwargs", {})}
    parameters = inspect.signature(getattr(sys.modules[module], name)).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.annotation is p.empty]
    missing = [f"--{key}.{name}" for name in missing if name in given and given[name] is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required")


# -- YAML --------------------------------------------------------------------------------------------------------------


def _read(path: str, classes: Mapping[str, str | None]) -> dict[str, Any]:
    """Read a file that a `LightningCLI` takes, with or without `fit:` around it.

    Args:
        path: The file, or its URL.
        classes: Class paths for sections without one, as in the YAML of `LightningCLI(MyModel)`.

    Raises:
        UsageError: If the file cannot be read, or has settings that a command cannot use.

    """
    found = _load(path)
    found = _mapping(path, found["fit"]) if "fit" in found else found
    unknown = [key for key in found if key not in (*_SECTIONS, *_IGNORED)]
    if unknown:
        raise UsageError(
            f"--config {path} has {named(unknown)}, which only the LightningCLI of your script knows; legal are"
            f" {', '.join([*_SECTIONS, 'seed_everything'])}. `compare_precisions` in Python accepts any module"
        )
    if found.get("ckpt_path") is not None:
        raise UsageError(f"--config {path} has a `ckpt_path`; a comparison trains from the start: remove it")
    sections = {key: _mapping(path, found[key]) for key in _SECTIONS if found.get(key) is not None}
    for key in ("model", "data", "optimizer", "lr_scheduler"):
        if key in sections and "class_path" not in sections[key]:
            if not classes.get(key):
                raise UsageError(f"--config {path}: `{key}` has no `class_path`; pass `--{key} package.module.Class`")
            sections[key] = {"class_path": classes[key], "init_args": sections[key]}
    trainer = sections.get("trainer", {})
    dropped = [f"trainer.{name}" for name in ("precision", "plugins") if trainer.pop(name, None) not in (None, [])]
    if dropped:
        note(f"lightning-amp: of --config {path}, {', '.join(dropped)} is ignored: this command sets the precision")
    seed = found.get("seed_everything")
    return {**sections, "seed": seed} if isinstance(seed, int) and not isinstance(seed, bool) else sections


def _load(path: str) -> dict[str, Any]:
    """Return a mapping, read as jsonargparse reads YAML."""
    from jsonargparse import get_loader

    try:
        with open_text(path, "--config") as file:
            value = get_loader("yaml")(file.read()) or {}
    except FileNotFoundError as error:
        raise UsageError(f"there is no file `{path}`, which --config names") from error
    except Exception as error:  # of YAML, or of an fsspec driver
        raise UsageError(f"--config {path} cannot be read as YAML: {error}") from error
    return _mapping(path, value)


def _mapping(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"--config {path} must hold a mapping with {', '.join(_SECTIONS)}, got {value!r}")
    return {str(name): inner for name, inner in value.items()}


# -- factories ---------------------------------------------------------------------------------------------------------


@final
class Factory:
    """Makes a module or a data module, as a `LightningCLI` would. Its `repr` is the same on every machine.

    Args:
        key: The section of the object to make.
        config: Sections of a `LightningCLI`: `data`, or `model` with or without `optimizer` and `lr_scheduler`.

    """

    def __init__(self, key: Literal["model", "data"], config: Mapping[str, Any]) -> None:
        self._key, self._config = key, config

    def __call__(self) -> Any:
        made = _CommandLine(
            args=dict(self._config), save_config_callback=None, run=False, seed_everything_default=False
        )
        return made.model if self._key == "model" else made.datamodule

    def __repr__(self) -> str:
        """Write the factory as code: `models.Net(width=64)`."""
        config = self._config[self._key]
        arguments = {**(config.get("init_args") or {}), **(config.get("dict_kwargs") or {})}
        return f"{config['class_path']}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


@final
class _CommandLine(LightningCLI):
    """A `LightningCLI` that makes a model or a data module, and no Trainer.

    Therefore the model gets the optimizer of the YAML, and `save_hyperparameters` saves the same values as in the
    user's own `LightningCLI`.
    """

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True, required=False)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(**kwargs, exit_on_error=False)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_object(args)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None
