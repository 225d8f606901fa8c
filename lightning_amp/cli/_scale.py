"""`lightning-amp scale`: show the loss scale of saved runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp._files import child, is_url, location
from lightning_amp._text import exact
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._output import json_writer, require_extra, table
from lightning_amp.cli._runner import Command, Outcome, Request
from lightning_amp.reports import SCALE_HISTORY_FILE, ScaleHistory, plot_histories

if TYPE_CHECKING:
    from rich.console import RenderableType

_DESCRIPTION = f"""\
Sum up the loss scale of saved runs, and draw it.

FILE is a file of ScaleMonitor(dirpath=...) or history.to_csv(...), or a folder
with a {SCALE_HISTORY_FILE}; URLs work too."""

_EPILOG = """\
  lightning-amp scale logs/run1 logs/run2 --plot scales.png"""


_OPTIONS: dict[str, dict[str, Any]] = {
    "files": {"nargs": "+", "metavar": "FILE", "help": "a scale history, or the folder it is in"},
    "--plot": {"metavar": "FILE", "help": "save one picture of all of them: .png, .svg, .pdf"},
    "--json": {"metavar": "FILE", "help": "save the figures as JSON"},
}


def _run(request: Request) -> Outcome:
    require_extra("rich")
    histories = {_label(path): _read(path) for path in request.options.files}
    files = {
        "--plot": lambda path: plot_histories(histories, path),
        "--json": json_writer(_data(histories)),
    }
    return Outcome(_text(histories), files=files)


# -- reading -----------------------------------------------------------------------------------------------------------


def _label(path: str) -> str:
    """Return the label of a run: its path, without the name that all such files have."""
    short = path.rstrip("/").removesuffix(f"/{SCALE_HISTORY_FILE}")
    return short or path


def _read(path: str) -> ScaleHistory:
    """Read a history from a file, a folder, or a URL, which is a folder unless it ends in `.csv`."""
    try:
        place = location(path, "FILE")
        is_folder = place.is_dir() if isinstance(place, Path) else not place.endswith(".csv")
        file = child(place, SCALE_HISTORY_FILE) if is_folder else place
        if isinstance(file, Path) and not file.exists():
            what = f"the folder `{path}` has no {SCALE_HISTORY_FILE}" if is_folder else f"there is no file `{path}`"
            raise UsageError(f"{what}; FILE is a file that `ScaleMonitor(dirpath=...)` writes, or its folder")
        return ScaleHistory.from_csv(file)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or is_url(path):  # each fsspec driver raises its own exceptions
            raise UsageError(f"`{path}` cannot be read: {type(error).__name__}: {error}") from error
        raise


# -- text --------------------------------------------------------------------------------------------------------------


def _text(histories: Mapping[str, ScaleHistory]) -> Iterator[RenderableType]:
    from rich.text import Text

    for label, history in histories.items():
        yield Text.assemble((label, "bold"), f": {history.summary()}")
    yield ""
    header = ("run", "steps", "skipped", "gradient", "loss", "first", "last", "lowest", "highest")
    yield table(header, [_row(label, history) for label, history in histories.items()])


def _row(label: str, history: ScaleHistory) -> list[str]:
    figures = _figures(history)
    counts = [figures[name] for name in ("steps", "skipped", "skipped_gradient", "skipped_loss")]
    scales = [figures[name] for name in ("first_scale", "last_scale", "lowest_scale", "highest_scale")]
    return [label, *(f"{count:,}" for count in counts), *("-" if scale is None else exact(scale) for scale in scales)]


# -- JSON --------------------------------------------------------------------------------------------------------------


def _data(histories: Mapping[str, ScaleHistory]) -> dict[str, Any]:
    return {
        "runs": [
            {"run": label, "summary": history.summary(), **_figures(history)} for label, history in histories.items()
        ]
    }


def _figures(history: ScaleHistory) -> dict[str, Any]:
    """Return the numbers of a run; scales are `None` if it has no record."""
    records = list(history)
    scales = [scale for record in records for scale in (record.scale, record.next_scale)]
    skipped = [record.reason for record in records if record.skipped]
    return {
        "steps": history.num_attempted,
        "applied": history.num_steps,
        "skipped": len(skipped),
        "skipped_gradient": skipped.count("gradient"),
        "skipped_loss": skipped.count("loss"),
        "first_scale": scales[0] if scales else None,
        "last_scale": scales[-1] if scales else None,
        "lowest_scale": min(scales, default=None),
        "highest_scale": max(scales, default=None),
    }


COMMAND = Command(
    "lightning-amp scale", _DESCRIPTION, _EPILOG, _OPTIONS, _run, outputs=("--plot", "--json"), takes_others=False
)
