"""The folder of a comparison: a file for each run that finished, so that none is run twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp._files import write_atomically
from lightning_amp._text import named
from lightning_amp._urls import child, location, open_to_read
from lightning_amp.compare._run import ArmRun

PLAN = "comparison.json"
_FORMAT = 1


@final
class Store:
    """Keeps runs in a folder, or its URL.

    Args:
        dirpath: The folder; it is made.
        identity: What makes it this comparison and no other: each part as a text.

    Raises:
        ValueError: If the folder has runs of another comparison; the text names it, and what differs.
        OSError: If the folder cannot be written.

    """

    def __init__(self, dirpath: Any, identity: Mapping[str, Any]) -> None:
        fine = isinstance(dirpath, (str, os.PathLike)) and bool(str(dirpath))
        require(fine, "dirpath", "a folder, its URL", dirpath, none="or `None`")
        self._folder = location(dirpath, "dirpath")
        self._identity = json.loads(json.dumps(identity))
        self._key = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self._warned = False
        self._reuses = True
        self._refuse_another(dirpath)
        self._write(PLAN, {"format": _FORMAT, "key": self._key, "comparison": self._identity})

    def refuse_reuse(self, without_text: Sequence[str]) -> None:
        """Load nothing from here if there are settings of these types: a warning says so."""
        if without_text:
            self._reuses = False
            _messages.warn(
                f"`compare_precisions` keeps what finishes in `{self._folder}`, but a second call runs it again: the"
                f" arguments hold {named(without_text)}, whose text does not tell one from another. Make it inside of"
                " `make_module` or `make_data`."
            )

    def load(self, label: str, seed: int) -> ArmRun | None:
        """Return a run that finished here; `None` if there is none, or if its file is torn."""
        name = f"{file_name(label, seed)}.json"
        data = self._read(name) if self._reuses else None
        if data is None:
            return None
        try:
            run = ArmRun.from_data(data["run"])
        except (ValueError, KeyError, TypeError):
            return None
        if data.get("key") != self._key:
            raise ValueError(f"`{child(self._folder, name)}` is a run of another comparison. Use another `dirpath`.")
        return run if run.finished and (run.label, run.seed) == (label, seed) else None

    def save(self, run: ArmRun) -> None:
        """Keep a run. If that fails, one warning says so, and the comparison goes on."""
        try:
            self._write(
                f"{file_name(run.label, run.seed)}.json", {"format": _FORMAT, "key": self._key, "run": run.to_data()}
            )
        except OSError as error:
            if not self._warned:
                self._warned = True
                _messages.warn(
                    f"`compare_precisions` could not write to `{self._folder}`: {error}. It goes on, and the report"
                    " will be complete; but a later call could not continue from here."
                )

    def work_folder(self, label: str, seed: int) -> Path | None:
        """Return the folder for what a run itself writes; `None` if this one is not on this machine."""
        return self._folder / file_name(label, seed) if isinstance(self._folder, Path) else None

    def _refuse_another(self, dirpath: Any) -> None:
        data = self._read(PLAN)
        theirs = None if data is None else data.get("comparison")
        if data is None or not isinstance(theirs, dict) or data.get("key") == self._key:
            return
        differ = [part for part, text in self._identity.items() if theirs.get(part) != text]
        shown = {part: _where_they_differ(str(theirs.get(part)), str(self._identity[part])) for part in differ}
        parts = "; ".join(f"its `{part}`: {his}, not {mine}" for part, (his, mine) in shown.items())
        raise ValueError(
            f"`dirpath` must be a folder of this comparison, or a new one; {str(dirpath)!r} has another comparison"
            f" ({parts or 'of another version'}). Use another folder, or remove that one."
        )

    def _read(self, name: str) -> dict[str, Any] | None:
        path = child(self._folder, name)
        if isinstance(path, Path):
            if not path.is_file():
                return None
        else:
            store, key = url_to_fs(path)
            if not store.isfile(key):
                return None
        try:
            with open_to_read(path, "text") as file:
                data = json.load(file)
        except ValueError:  # torn, or no text at all
            return None
        return data if isinstance(data, dict) and data.get("format") == _FORMAT else None

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps(data, allow_nan=False)
        write_atomically(child(self._folder, name), lambda file: file.write(text))


def file_name(label: str, seed: int) -> str:
    """Return a name that every file system takes; different labels have different ones."""
    simple = re.sub(r"[^A-Za-z0-9._+-]+", "-", label).strip("-.")[:60]
    if simple != label:
        simple = f"{simple}-{hashlib.sha256(label.encode()).hexdigest()[:6]}".strip("-")
    return f"{simple}-seed{seed}"


def _where_they_differ(one: str, other: str, most: int = 200) -> tuple[str, str]:
    """Return the part of two long texts in which they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - 60) if max(len(one), len(other)) > most else 0
    parts = [
        f"{'...' * (start > 0)}{text[start : start + most]}{'...' * (len(text) > start + most)}"
        for text in (one, other)
    ]
    return parts[0], parts[1]
