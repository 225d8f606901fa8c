"""Run a command: read its options, write its files, print its result, and return its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from typing_extensions import final, override

from lightning_amp._compat._messages import is_unknown_option
from lightning_amp.cli._errors import FINE, TO_DO, UsageError
from lightning_amp.cli._output import check_output, note, require_extra, save, show, write

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lightning_amp.cli._user_classes import UserClasses

EXTRA = ("jsonargparse", "docstring_parser", "typeshed_client", "rich")
"""Modules of the extra `cli`. The two in the middle are needed by jsonargparse for the arguments of classes."""

CLASS_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "CLASS", "help": "the LightningModule: package.module.Class"},
    "--data": {"metavar": "CLASS", "help": "the LightningDataModule: package.module.Class"},
    "--config": {"metavar": "FILE", "help": "the YAML of a LightningCLI", "action": "append", "default": []},
}
"""Options of commands that take a module and its data."""


@final
@dataclass(frozen=True)
class Command:
    """One command of `lightning-amp`.

    Attributes:
        name: The name with the program: `"lightning-amp scale"`.
        description: Text at the top of its `--help`.
        epilog: Examples and exit statuses, below the options.
        options: The arguments of :meth:`argparse.ArgumentParser.add_argument` for each option.
        run: Does the work and returns the outcome.
        outputs: Options that name a file to write. They are checked before any work is done.
        usage: The first line of its `--help`; `None` leaves it to argparse.
        takes_others: Whether the user's classes add options, such as `--model.width 64`.

    """

    name: str
    description: str
    epilog: str
    options: Mapping[str, Mapping[str, Any]]
    run: Callable[[Request], Outcome]
    outputs: tuple[str, ...] = ("--json",)
    usage: str | None = None
    takes_others: bool = True


@final
class Request(NamedTuple):
    """The command line: the values of the command's own options, and the other arguments."""

    command: str
    options: Any
    others: Sequence[str]
    parser: Parser

    def user_classes(self, reason: str = "the precision is an option of this command") -> UserClasses:
        """Parse the options of the user's classes without making an object of them.

        Args:
            reason: Why the precision of a YAML is ignored.

        Raises:
            UsageError: If a class cannot be imported, or does not take an argument or its value.

        """
        require_extra(*EXTRA)
        from lightning_amp.cli._lightning_config import read_config
        from lightning_amp.cli._user_classes import parse_user_classes

        paths: list[str] = self.options.config
        configs = [read_config(path, self.options.model, self.options.data) for path in paths]
        for path, config in zip(paths, configs, strict=True):
            if config.dropped:
                note(f"{self.command}: of --config {path}, {', '.join(config.dropped)} is ignored: {reason}")
        given = {key: getattr(self.options, key) for key in ("model", "data")}
        classes = [f"--{key}={name}" for key, name in given.items() if name is not None]
        found = parse_user_classes([config.sections for config in configs], [*classes, *self.others])
        seeds = [config.seed for config in configs if config.seed is not None]
        return found._replace(seed=seeds[-1] if seeds else 0)


@final
@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        shown: The text for a terminal.
        markdown: The text for a pipe or a file; `None` prints `shown` there, too.
        files: The function that writes the file of each option.
        has_work: Whether the user has something to do: exit status 1.

    """

    shown: Iterable[RenderableType]
    markdown: str | None = None
    files: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    has_work: bool = False


def run(command: Command, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    parser = Parser(command.name, command.description, command.epilog, command.usage)
    for option, settings in command.options.items():
        parser.add_argument(option, **settings)
    options, others = parser.parse_known_args(arguments)
    if others and not command.takes_others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    paths: dict[str, str | None] = {option: getattr(options, option[2:]) for option in command.outputs}
    for option, path in paths.items():
        check_output(option, path)
    found = command.run(Request(command.name, options, others, parser))
    for option, write_file in found.files.items():
        if path := paths[option]:
            save(option, path, write_file)
    if found.markdown is None or sys.stdout.isatty():
        require_extra("rich")
        show(found.shown)
    else:
        write(found.markdown)
    return TO_DO if found.has_work else FINE


class HelpShown(Exception):  # noqa: N818 - not an error
    """`--help` was printed; the command ends."""


@final
class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the legal options."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        self.options: list[str] = []
        """Legal options in the order in which they were added."""
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @override
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self.options += action.option_strings[-1:]
        return action

    @override
    def error(self, message: str) -> NoReturn:
        if is_unknown_option(message):
            message += f"; the options are {', '.join(self.options)}"
        raise UsageError(f"{message} (`{self.prog} --help` says more)")

    @override
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown
