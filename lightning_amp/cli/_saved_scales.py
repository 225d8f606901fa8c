"""`lightning-amp scale`: show the loss scale of saved runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_amp._files import child, is_url, location
from lightning_amp._plain_data import Table
from lightning_amp._text import exact
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._output import Outcome, json_writer
from lightning_amp.reports import SCALE_HISTORY_FILE, ScaleHistory, plot_histories

SCALE = f"""\
Sum up the loss scale of saved runs, and draw it.

FILE is a file of ScaleMonitor(dirpath=...) or history.to_csv(...), or a folder
with a {SCALE_HISTORY_FILE}; URLs work too.

  lightning-amp scale logs/run1 logs/run2 --plot scales.png"""

SCALE_OPTIONS: dict[str, dict[str, Any]] = {
    "FILE": {"nargs": "+", "help": "a scale history, or the folder it is in"},
    "--plot": {"metavar": "FILE", "help": "save one picture of all of them: .png, .svg, .pdf"},
    "--json": {"metavar": "FILE", "help": "save the figures as JSON"},
}


def run_scale(options: Any) -> Outcome:
    """Sum up the histories, several side by side."""
    histories = {_label(path): _read(path) for path in options.FILE}
    figures = {label: _figures(history) for label, history in histories.items()}
    header = ["run", *(name.replace("_", " ") for name in next(iter(figures.values())))]
    rows = [[label, *map(_shown, own.values())] for label, own in figures.items()]
    parts = [f"`{label}`: {history.summary()}" for label, history in histories.items()]
    data = [{"run": label, "summary": histories[label].summary(), **own} for label, own in figures.items()]
    files = {"--plot": lambda path: plot_histories(histories, path), "--json": json_writer({"runs": data})}
    return Outcome("\n\n".join([*parts, str(Table(header, rows))]) + "\n", files)


def _label(path: str) -> str:
    """Return the label of a run: its path, without the name that all such files have."""
    return path.rstrip("/").removesuffix(f"/{SCALE_HISTORY_FILE}") or path


def _read(path: str) -> ScaleHistory:
    """Read a history from a file, a folder, or a URL, which is a folder unless it ends in `.csv`."""
    place = location(path, "FILE")
    is_folder = place.is_dir() if isinstance(place, Path) else not place.endswith(".csv")
    file = child(place, SCALE_HISTORY_FILE) if is_folder else place
    if isinstance(file, Path) and not file.exists():
        what = f"the folder `{path}` has no {SCALE_HISTORY_FILE}" if is_folder else f"there is no file `{path}`"
        raise UsageError(f"{what}; FILE is a file that `ScaleMonitor(dirpath=...)` writes, or its folder")
    try:
        return ScaleHistory.from_csv(file)
    except Exception as error:
        if isinstance(error, OSError) or (is_url(path) and not isinstance(error, ValueError)):  # of an fsspec driver
            raise UsageError(f"`{path}` cannot be read: {type(error).__name__}: {error}") from error
        raise


def _figures(history: ScaleHistory) -> dict[str, Any]:
    """Return the numbers of a run; scales are `None` if it has no record."""
    records = list(history)
    scales = [scale for record in records for scale in (record.scale, record.next_scale)]
    reasons = [record.reason for record in records if record.skipped]
    return {
        "steps": history.num_attempted,
        "skipped": len(reasons),
        "skipped_gradient": reasons.count("gradient"),
        "skipped_loss": reasons.count("loss"),
        "first_scale": scales[0] if scales else None,
        "last_scale": scales[-1] if scales else None,
        "lowest_scale": min(scales, default=None),
        "highest_scale": max(scales, default=None),
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else exact(value) if isinstance(value, float) else f"{value:,}"
