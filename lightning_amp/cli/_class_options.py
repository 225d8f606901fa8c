"""What commands that take a module and its data share: `--model`, `--data`, `--config`, and what they describe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.cli._output import note, require_extra

if TYPE_CHECKING:
    from lightning_amp.cli._user_classes import UserClasses

EXTRA = ("jsonargparse", "docstring_parser", "typeshed_client", "rich")
"""What the extra `cli` brings: jsonargparse needs the two in the middle for the arguments of classes."""

CLASS_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "CLASS", "help": "the LightningModule: package.module.Class"},
    "--data": {"metavar": "CLASS", "help": "the LightningDataModule: package.module.Class"},
    "--config": {"metavar": "FILE", "help": "the YAML of a LightningCLI", "action": "append", "default": []},
}


def user_classes(
    command: str,
    options: Any,
    others: Sequence[str],
    instead: str = "the precision is an option of this command",
) -> tuple[UserClasses, int | None]:
    """Parse what describes the user's classes; nothing is made.

    Args:
        command: Who asks, for what it notes on stderr.
        options: Those of :data:`CLASS_OPTIONS`, parsed.
        others: Arguments that the command does not know, which are the classes': `--model.width 64`.
        instead: Tells why the precision of a YAML is left out.

    Returns:
        The classes, and `seed_everything` of the last YAML that has one.

    Raises:
        UsageError: If a class cannot be imported, or does not take an argument or its value.

    """
    require_extra(*EXTRA)
    from lightning_amp.cli._lightning_config import read_config
    from lightning_amp.cli._user_classes import parse_user_classes

    configs = [read_config(path, options.model, options.data) for path in options.config]
    for path, config in zip(options.config, configs, strict=True):
        if config.dropped:
            dropped = ", ".join(config.dropped)
            note(f"{command}: of --config {path}, {dropped} is left out: {instead}")
    seeds = [config.seed for config in configs if config.seed is not None]
    found = parse_user_classes([config.sections for config in configs], [*_classes(options, configs), *others])
    return found, seeds[-1] if seeds else None


def _classes(options: Any, configs: Sequence[Any]) -> Iterator[str]:
    """Hand on `--model` and `--data`, unless they only named the class that a YAML leaves out."""
    for key in ("model", "data"):
        given = getattr(options, key)
        if given is not None and not any(config.sections.get(key, {}).get("class_path") == given for config in configs):
            yield from (f"--{key}", given)
