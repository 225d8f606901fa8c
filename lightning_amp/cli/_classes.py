"""The user's module, data and Trainer on a command line, as in a `LightningCLI`, and the YAML of one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import final, override

from lightning_amp._compat._names import (
    LightningArgumentParser,
    LightningCLI,
    LightningDataModule,
    LightningModule,
    Trainer,
)
from lightning_amp.cli._output import UsageError


def class_parser(**settings: Any) -> LightningArgumentParser:
    """Return a parser that also takes the arguments of the user's classes, such as `--model.width 64`."""
    from jsonargparse import ActionConfigFile

    try:
        parser = LightningArgumentParser(**settings)
    except ModuleNotFoundError as error:  # Lightning's message explains how to install the extra of jsonargparse
        raise UsageError(f"Lightning's own command line lacks a library: {error}") from error
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parser.add_optimizer_args()
    parser.add_lr_scheduler_args()
    return parser


def user_classes(options: Any) -> dict[str, Any]:
    """Return what our functions take: factories for the classes among parsed options, and the Trainer's arguments."""
    options = options.as_dict()
    own = {key: options[key] for key in ("model", "optimizer", "lr_scheduler") if options.get(key)}
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    given = {name: value for name, value in options["trainer"].items() if value != defaults.get(name)}
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
        made = parser.instantiate_classes(parser.parse_object({"trainer": given}))["trainer"]
    factories = {"make_module": Factory("model", own), "make_data": Factory("data", {"data": options["data"]})}
    return {**factories, "trainer_kwargs": {name: made[name] for name in given}}


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
