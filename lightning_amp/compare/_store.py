"""Keep the finished runs of a comparison in a folder, one file per run, so that none runs twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._files import child, location, open_text, write_atomically
from lightning_amp._text import named
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._run_file import FORMAT, RunFile

_PLAN = "comparison.json"


@final
class Store:
    """Keeps runs in a folder, or at its URL. Later calls may add arms and seeds.

    Args:
        dirpath: The folder, which is made.
        settings: The settings that all runs share, each as a text.
        arms: The settings of each arm as a text, by label.
        without_text: Types of objects, and functions, that have the same text as others. If there are any, no earlier
            run is loaded, and a warning names them.

    Raises:
        ValueError: If the folder has runs with other settings. The message names the folder and the settings.
        OSError: If the folder cannot be written.

    """

    def __init__(
        self,
        dirpath: Any,
        settings: Mapping[str, Any],
        arms: Mapping[str, str],
        without_text: Sequence[str] = (),
    ) -> None:
        fine = isinstance(dirpath, (str, os.PathLike)) and bool(str(dirpath))
        require(fine, "dirpath", "a folder, its URL", dirpath, none="or `None`")
        self._folder = location(dirpath, "dirpath")
        self._settings, self._arms = settings, arms
        self._warned = False
        self._reuses = not without_text
        earlier = self._read(_PLAN) or {}
        self._refuse_other_settings(dirpath, earlier)
        kept: Any = earlier.get("arms") if isinstance(earlier.get("comparison"), dict) else None
        data = {"format": FORMAT, "comparison": settings, "arms": {**(kept or {}), **arms}}
        write_atomically(child(self._folder, _PLAN), lambda file: json.dump(data, file))
        if without_text:
            _messages.warn(
                f"`compare_precisions` keeps finished runs in `{self._folder}`, but a second call runs them again: the"
                f" arguments hold {named(without_text)}, whose text does not tell one from another. Make an object"
                " inside of `make_module` or `make_data`; move a function or a class to the top level of a file."
            )

    @property
    def folder(self) -> Path | str:
        """Return the folder, or its URL."""
        return self._folder

    def file(self, label: str, seed: int, what: str = "") -> RunFile:
        """Return the file of a run; `what` tells measurements of a run apart that are kept beside it: `"speed"`."""
        key = json.dumps([self._settings, self._arms[label]], sort_keys=True)
        folder = self._folder.absolute() if isinstance(self._folder, Path) else self._folder
        path = child(folder, f"{file_name(label, seed)}{what and f'.{what}'}.json")
        return RunFile(str(path), hashlib.sha256(key.encode()).hexdigest()[:16])

    def load(self, label: str, seed: int, what: str = "", *, failed: bool = False) -> ArmRun | None:
        """Return a kept run.

        Args:
            label: Its label.
            seed: Its seed.
            what: As for :meth:`file`.
            failed: Whether a run that failed is returned as well.

        Returns:
            The run; `None` if there is none, or if its file is half written.

        Raises:
            ValueError: If the file is of a run with other settings.

        """
        file = self.file(label, seed, what)
        data = self._read(file.path.rpartition("/")[2].rpartition(os.sep)[2]) if self._reuses else None
        if data is None:
            return None
        try:
            run = ArmRun.from_data(data.get("run"))
        except ValueError:
            return None
        if data.get("key") != file.key:
            raise ValueError(f"`{file.path}` is a run of another comparison. Use another `dirpath`.")
        return run if (run.finished or failed) and (run.label, run.seed) == (label, seed) else None

    def save(self, run: ArmRun, what: str = "") -> None:
        """Keep a run. If that fails, warn once, and continue the comparison."""
        try:
            self.file(run.label, run.seed, what).write(run)
        except OSError as error:
            self.warn_of(f"{error}")

    def warn_of(self, error: str) -> None:
        """Warn once that runs could not be written."""
        if not self._warned:
            self._warned = True
            _messages.warn(
                f"`compare_precisions` could not write to `{self._folder}`: {error}. It goes on, and the report"
                " will be complete; but a later call could not continue from here."
            )

    def work_folder(self, label: str, seed: int) -> Path | None:
        """Return the folder for the files that a run itself writes; `None` if the store is not on this machine."""
        return self._folder / file_name(label, seed) if isinstance(self._folder, Path) else None

    def _refuse_other_settings(self, dirpath: Any, earlier: Mapping[str, Any]) -> None:
        theirs: Any = earlier.get("comparison")
        if not isinstance(theirs, dict):
            return
        pairs = [(part, theirs.get(part), mine) for part, mine in self._settings.items()]
        arms: Any = earlier.get("arms")
        arms = arms if isinstance(arms, dict) else {}
        pairs += [(f"precisions[{label!r}]", arms[label], mine) for label, mine in self._arms.items() if label in arms]
        parts = [
            "its `{}`: {}, not {}".format(part, *_where_they_differ(str(kept), str(mine)))
            for part, kept, mine in pairs
            if kept != mine
        ]
        if parts:
            raise ValueError(
                f"`dirpath` must be a folder of this comparison, or a new one; {str(dirpath)!r} has another comparison"
                f" ({'; '.join(parts)}). Use another folder, or remove that one."
            )

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open_text(child(self._folder, name)) as file:
                data = json.load(file)
        except (FileNotFoundError, ValueError):  # a `ValueError`: the file is half written, or is not text
            return None
        return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def file_name(label: str, seed: int) -> str:
    """Return a name that every file system accepts, and that no other label has."""
    simple = re.sub(r"[^A-Za-z0-9._+-]+", "-", label).strip("-.")[:60]
    if simple != label:
        simple = f"{simple}-{hashlib.sha256(label.encode()).hexdigest()[:6]}".strip("-")
    return f"{simple}-seed{seed}"


def _where_they_differ(one: str, other: str, most: int = 200) -> list[str]:
    """Return the parts of two long texts in which they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - 60) if max(len(one), len(other)) > most else 0
    return [
        f"{'...' * (start > 0)}{text[start : start + most]}{'...' * (len(text) > start + most)}"
        for text in (one, other)
    ]
