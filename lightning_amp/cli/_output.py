"""Print and save the results of commands, and write the exceptions of the user as one line."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import final

from lightning_amp._files import location
from lightning_amp._user_line import is_own_project, owner_of

_REFUSALS = (ValueError, TypeError, ImportError, OSError, RuntimeError, FloatingPointError)
"""Exceptions that this package documents: something about the user's arguments, module or machine."""

_OPTIONS = {
    "make_module": "model",
    "make_data": "data",
    "trainer_kwargs": "trainer",
    "num_seeds": "seeds",
    "num": "devices-at-once",
    "memory_limit_gib": "memory-limit-gib",
    **{name: name for name in ("precisions", "precision", "margins", "seed", "control", "dirpath", "device")},
    "tolerance": "tolerance",
}
"""The options of arguments in Python."""


class UsageError(Exception):
    """The user asked for something impossible. `main` prints the text as one line: the fault, and what is legal."""


@final
@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        markdown: The text to print.
        files: The function that writes the file of each option.
        has_work: Whether the user has something to do: exit status 1.

    """

    markdown: str
    files: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    has_work: bool = False


def usage_error(error: Exception) -> UsageError | None:
    """Turn an exception into one line; return `None` if it is an error of this package.

    The line names the last line of the user's own files, even if a library raised another exception from it. Without
    such a line, a library refused the user's code (a LightningModule without an optimizer), or this package refused an
    argument.
    """
    raised: BaseException | None = error
    while raised is not None:
        own = [frame for frame in traceback.extract_tb(raised.__traceback__) if is_own_project(frame.filename)]
        if own:
            place = f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}"
            return UsageError(f"{type(raised).__name__} in {place} (`{own[-1].name}`): {raised}")
        raised = raised.__cause__ or raised.__context__
    frames = traceback.extract_tb(error.__traceback__)
    if frames and owner_of(frames[-1].filename) not in ("ours", "Python"):
        return UsageError(f"{type(error).__name__}: {error}")
    return UsageError(as_options(str(error))) if isinstance(error, _REFUSALS) else None


def as_options(text: str) -> str:
    """Write the arguments in a message of this package as options: `--memory-limit-gib 4`, `--margins.val_acc`."""

    def option(found: re.Match[str]) -> str:
        name, value, key = found.groups()
        between = " " if name == "precisions" else "."
        return f"`--{_OPTIONS[name]}{f' {value.lower()}' if value else f'{between}{key}' if key else ''}`"

    text = re.sub(r"`\(\"(min|max)\", ([^)`]+)\)`", r"`\1:\2`", text)
    return re.sub(rf"`({'|'.join(_OPTIONS)})(?:=([^`]*)|\['([^`]*?)'\])?`", option, text)


def require_extra(*modules: str) -> None:
    """Refuse to go on without libraries of the extra `cli`; the error says how to install them."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            raise UsageError(f"run `pip install 'lightning_amp[cli]'`: {module} is missing ({error})") from error


def show(markdown: str) -> None:
    """Print Markdown to stdout: laid out on a terminal, otherwise as it is, with `?` for what its encoding lacks.

    Rich reads `NO_COLOR`, `FORCE_COLOR`, `COLUMNS` and `TERM`.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(markdown.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()  # the interpreter does it at its end, and prints an error if the pipe is closed


def check_output(option: str, path: str | None) -> None:
    """Refuse a folder, a pipe, or a URL that fsspec does not know, before any work is done."""
    if path is None:
        return
    try:
        place = location(path, option)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    if path == "-" or (isinstance(place, Path) and place.exists() and not place.is_file()):
        raise UsageError(f"{option} must be a file, got {path!r}")


def save(option: str, path: str, write: Callable[[str], object]) -> None:
    """Let `write` make the file `path`."""
    try:
        write(path)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{option} {path} cannot be written: {error}") from error
