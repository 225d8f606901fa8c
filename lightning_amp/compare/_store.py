"""Keep the runs of a comparison in a folder, one file per run, so that none runs twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._files import child, location, open_text, write_atomically
from lightning_amp.compare._run import Run, from_data, to_data
from lightning_amp.compare._spec import versions

_FORMAT = 3
"""Is written into each file, so that files of another format are not read."""


@final
class Store:
    """Keeps runs in a folder, or at its URL. Later calls may add arms and seeds.

    Args:
        dirpath: The folder, which is made.
        settings: The settings that all runs share, each as a text.
        arms: The settings of each arm as a text, by label.

    Attributes:
        folder: The folder; `None` if it is not on this machine.

    Raises:
        OSError: If the folder cannot be made.

    """

    def __init__(self, dirpath: Any, settings: Mapping[str, str], arms: Mapping[str, str]) -> None:
        fine = isinstance(dirpath, (str, os.PathLike)) and bool(str(dirpath))
        require(fine, "dirpath", "a folder, its URL", dirpath, none="or `None`")
        self._dirpath, self._folder = str(dirpath), location(dirpath, "dirpath")
        self._settings = {label: {f"precisions[{label!r}]": arm, **settings} for label, arm in arms.items()}
        self.folder: Path | None = None
        if isinstance(self._folder, Path):
            self.folder = self._folder = self._folder.absolute()
            self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, label: str, seed: int, *, failed: bool = False) -> Run | None:
        """Return a kept run; `None` if there is none, if its file is torn, or if it failed, unless `failed` is true.

        Raises:
            ValueError: If the file is of a run with other settings or versions. The message names them.

        """
        name = f"{file_name(label, seed)}.json"
        try:
            with open_text(child(self._folder, name)) as file:
                data: Any = json.load(file)
            run, theirs = from_data(Run, data["run"]), data["settings"]
            if data["format"] != _FORMAT:
                return None
        except (FileNotFoundError, KeyError, TypeError, ValueError):  # a `ValueError`: it is half written, or no text
            return None
        pairs = [(part, theirs.get(part), mine) for part, mine in self._settings[label].items()]
        if run.finished:
            pairs += [(part, run.versions.get(part, "").partition("+")[0], mine) for part, mine in versions().items()]
        wrong = [f"its `{part}`" for part, theirs, mine in pairs if theirs != mine]
        if wrong:
            raise ValueError(
                f"`dirpath` must be a folder of this comparison, or a new one; {self._dirpath!r} has another comparison"
                f" ({', '.join(wrong)} in {name} differs). Use another folder, or remove that one."
            )
        return run if run.finished or failed else None

    def save(self, run: Run) -> None:
        """Keep a run. If that fails, warn, and continue the comparison."""
        data = {"format": _FORMAT, "settings": self._settings[run.label], "run": to_data(run)}
        path = child(self._folder, f"{file_name(run.label, run.seed)}.json")
        try:
            write_atomically(path, lambda file: file.write(json.dumps(data, allow_nan=False)))
        except OSError as error:
            _messages.warn(
                f"`compare_precisions` could not write to `{self._folder}`: {error}. It goes on, and the report"
                " will be complete; but a later call could not continue from here."
            )


def file_name(label: str, seed: int) -> str:
    """Return a name that every file system accepts, and that no other label has."""
    simple = re.sub(r"[^A-Za-z0-9._+-]+", "-", label).strip("-.")[:60]
    if simple != label:
        simple = f"{simple}-{hashlib.sha256(label.encode()).hexdigest()[:6]}".strip("-")
    return f"{simple}-seed{seed}"
