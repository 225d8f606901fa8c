"""An `argparse` parser that reports wrong use in one line and leaves the exit to the caller."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from typing_extensions import final, override

from lightning_amp.cli._exits import UsageError


class HelpShown(Exception):  # noqa: N818 - not an error
    """`--help` was printed, and nothing else is to be done."""


@final
class Parser(argparse.ArgumentParser):
    """A parser of one command."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        self.options: list[str] = []
        """What is legal, in the order in which it was added."""
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
        if message.startswith("unrecognized arguments"):
            message += f"; the options are {', '.join(self.options)}"
        raise UsageError(f"{message} (`{self.prog} --help` says more)")

    @override
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown
