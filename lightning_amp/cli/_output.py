"""Print and save the results of commands."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_amp._files import is_url, location, write_atomically
from lightning_amp._plain_data import Table, null, plain
from lightning_amp.cli._errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType


WIDEST = 100
"""Longest line of text or of a chart, in characters. Longer ones are hard to read, even on a wider terminal."""

GAP = 2
"""Characters between two columns of a table."""


def require_extra(*modules: str) -> None:
    """Refuse to go on without libraries of the extra `cli`; the error says how to install them."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            advice = "run `pip install 'jsonargparse[signatures]' rich`, which is the extra `cli`"
            raise UsageError(f"this needs {module}, which cannot be imported ({error}); {advice}") from error


# -- text --------------------------------------------------------------------------------------------------------------


def show(parts: Iterable[RenderableType]) -> None:
    """Print to stdout, as wide as the terminal; if it is no terminal, in 80 characters and without colour.

    Rich reads `NO_COLOR`, `FORCE_COLOR`, `COLUMNS` and `TERM`. Rich does not print the text itself, because it would
    end the process with status 1 if the pipe is closed.
    """
    from rich.console import Console

    real, text = Console(), io.StringIO()
    console = Console(
        file=text, width=real.width, force_terminal=real.is_terminal, highlight=False, markup=False, emoji=False
    )
    for part in parts:
        console.print(part)
    write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


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


def output_width() -> int:
    """Return how many characters fit into a line."""
    from rich.console import Console

    return Console().width


def paragraph(text: str | RenderableType) -> RenderableType:
    """Return the text with its lines wrapped to a readable length."""
    from rich.constrain import Constrain
    from rich.text import Text

    return Constrain(Text(text) if isinstance(text, str) else text, WIDEST)


def laid_out(blocks: Iterable[str | Table]) -> Iterator[RenderableType]:
    """Yield the blocks of a report, Markdown or tables, for a terminal, with empty lines between them."""
    from rich.markdown import Markdown

    for number, block in enumerate(blocks):
        if number:
            yield ""
        yield paragraph(Markdown(block)) if isinstance(block, str) else table(*block[:2], justify="left")


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], justify: Literal["left", "right"] = "right"
) -> RenderableType:
    """Return a table without rules, whose first column is aligned to the left.

    If it is too wide, rows and columns are swapped if it then fits or has fewer columns. If it still does not fit, its
    cells are wrapped.
    """
    from rich.table import Table as RichTable

    lines: Sequence[Sequence[str]] = [header, *rows]
    turned = list(zip(*lines, strict=True))
    width = output_width()
    if _width(lines) > width and (_width(turned) <= width or len(lines) < len(turned)):
        lines = turned
    made = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for number, name in enumerate(lines[0]):
        made.add_column(name, justify=justify if number else "left", overflow="fold")
    for row in lines[1:]:
        made.add_row(*row)
    return made


def _width(lines: Sequence[Sequence[str]]) -> int:
    """Return the width of a table whose cells are not wrapped."""
    return sum(max(map(len, column)) + GAP for column in zip(*lines, strict=True)) - GAP


# -- files -------------------------------------------------------------------------------------------------------------


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
