"""Print and save the results of commands."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp._files import is_url, location, write_atomically
from lightning_amp._plain_data import null, plain
from lightning_amp.cli._errors import UsageError


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


def require_extra(*modules: str) -> None:
    """Refuse to go on without libraries of the extra `cli`; the error says how to install them."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            advice = "run `pip install 'jsonargparse[signatures]' rich`, which is the extra `cli`"
            raise UsageError(f"this needs {module}, which cannot be imported ({error}); {advice}") from error


def show(markdown: str) -> None:
    """Print Markdown to stdout: laid out on a terminal, otherwise as it is.

    Rich reads `NO_COLOR`, `FORCE_COLOR`, `COLUMNS` and `TERM`.
    """
    if not sys.stdout.isatty():
        write(markdown)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))


def write(text: str) -> None:
    """Write a text to stdout; characters that its encoding lacks become question marks.

    Raises:
        BrokenPipeError: If the reader has closed the pipe.
        UsageError: If the text cannot be written for another reason, such as a full disk.

    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the output cannot be written: {error}") from error


def note(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def check_output(option: str, path: str | None) -> None:
    """Refuse a folder, or a URL that fsspec does not know, before any work is done."""
    if path is None:
        return
    try:
        place = None if path in ("", "-") else location(path, option)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    if place is None or (isinstance(place, Path) and place.is_dir()):
        raise UsageError(f"{option} must be a file, got {path!r}; to print it, write `{option} /dev/stdout`")


def save(option: str, path: str, write: Callable[[str], object]) -> None:
    """Let `write` make the file `path`, which may also be a pipe or `/dev/stdout`."""
    try:
        place = None if is_url(path) else Path(path)
        if place is None or not (place.is_symlink() or (place.exists() and not place.is_file())):
            write(path)
            return
        with tempfile.TemporaryDirectory() as folder:  # a move would replace the pipe
            write(str(Path(folder) / f"output{place.suffix}"))
            (made,) = Path(folder).iterdir()  # matplotlib adds a suffix where there is none
            with made.open("rb") as source, place.open("wb") as target:
                shutil.copyfileobj(source, target)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{option} {path} cannot be written: {error}") from error


def json_writer(data: Any) -> Callable[[str], object]:
    """Return a function that writes JSON to a path, with null for NaN and infinities."""
    text = json.dumps(plain(data, null), indent=1, allow_nan=False)
    return lambda path: write_atomically(path, lambda file: file.write(f"{text}\n"))
