"""Descriptions of objects. Another process makes the objects from them, as a `LightningCLI` would."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import final, override

Plain = Mapping[str, Any]
"""A class as `{"class_path": ..., "init_args": {...}}`, nested as needed, with values that jsonargparse parsed."""


@final
class Factory:
    """Makes a module or a data module. Its `repr` is the same on every machine.

    Args:
        key: The section of the object to make.
        config: Sections of a `LightningCLI`: `data`, or `model` with or without `optimizer` and `lr_scheduler`.
        import_from: Folders with the classes, which another process puts first into `sys.path`.

    """

    def __init__(self, key: Literal["model", "data"], config: Plain, import_from: tuple[str, ...] = ()) -> None:
        self._key, self._config, self._import_from = key, config, import_from

    def __call__(self) -> Any:
        _import_from(self._import_from)
        made = _CommandLine(
            args=dict(self._config), save_config_callback=None, run=False, seed_everything_default=False
        )
        return made.model if self._key == "model" else made.datamodule

    def __repr__(self) -> str:
        """Write the factory as code without the folders, so that a comparison can continue in another folder."""
        extra = [f"{name}: {describe(value)}" for name, value in self._config.items() if name != self._key]
        return ", ".join([describe(self._config[self._key]), *extra])


@final
class TrainerArgument:
    """A callback, a logger, a strategy, ...: pickled as a description, and unpickled as the object itself.

    Each process gets its own object, which need not be picklable.
    """

    def __init__(self, name: str, value: Any, import_from: tuple[str, ...] = ()) -> None:
        self._arguments = name, value, import_from

    def __reduce__(self) -> tuple[Any, ...]:
        return make_trainer_argument, self._arguments

    def __repr__(self) -> str:
        """Write the object as code."""
        _, value, _ = self._arguments
        return describe(value[0] if isinstance(value, list) else value)


def make_trainer_argument(name: str, value: Any, import_from: Sequence[str] = ()) -> Any:
    """Make the object that an argument of the Trainer describes, or the only item of a list."""
    _import_from(import_from)
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of jsonargparse about Lightning
        made = parser.instantiate_classes(parser.parse_object({"trainer": {name: value}}))
    found = made["trainer"][name]
    return found[0] if isinstance(value, list) else found


def describe(value: Any) -> str:
    """Write a class and its arguments as code: `models.Net(width=64)`.

    A mapping becomes `dict(...)`, which keeps its order.
    """
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        inside = ", ".join(f"{name}={describe(argument)}" for name, argument in arguments.items())
        return f"{value['class_path']}({inside})"
    if isinstance(value, Mapping):
        return f"dict([{', '.join(f'({name!r}, {describe(inner)})' for name, inner in value.items())}])"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    return repr(value)


def _import_from(folders: Sequence[str]) -> None:
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


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
