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
from lightning_amp._files import write_atomically
from lightning_amp._text import named
from lightning_amp._urls import child, location, open_to_read
from lightning_amp.compare._run import ArmRun

_PLAN = "comparison.json"
_FORMAT = 1


@final
class Store:
    """Keeps runs in a folder, or at its URL.

    Args:
        dirpath: The folder, which is made.
        identity: The settings that distinguish this comparison from others, each as a text.
        without_text: Types of settings whose objects all have the same text. If there are such types, no earlier run is
            loaded, and a warning names the types.

    Raises:
        ValueError: If the folder has runs of another comparison. The message names the folder and the settings that
            differ.
        OSError: If the folder cannot be written.

    """

    def __init__(self, dirpath: Any, identity: Mapping[str, Any], without_text: Sequence[str] = ()) -> None:
        fine = isinstance(dirpath, (str, os.PathLike)) and bool(str(dirpath))
        require(fine, "dirpath", "a folder, its URL", dirpath, none="or `None`")
        self._folder = location(dirpath, "dirpath")
        self._key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self._warned = False
        self._reuses = not without_text
        self._refuse_another(dirpath, identity)
        self._write(_PLAN, {"comparison": identity})
        if without_text:
            _messages.warn(
                f"`compare_precisions` keeps finished runs in `{self._folder}`, but a second call runs them again: the"
                f" arguments hold {named(without_text)}, whose text does not tell one from another. Make it inside of"
                " `make_module` or `make_data`."
            )

    def load(self, label: str, seed: int) -> ArmRun | None:
        """Return a run that has finished in this store; `None` if there is none, or if its file is half written."""
        name = f"{file_name(label, seed)}.json"
        data = self._read(name) if self._reuses else None
        if data is None:
            return None
        try:
            run = ArmRun.from_data(data.get("run"))
        except ValueError:
            return None
        if data.get("key") != self._key:
            raise ValueError(f"`{child(self._folder, name)}` is a run of another comparison. Use another `dirpath`.")
        return run if run.finished and (run.label, run.seed) == (label, seed) else None

    def save(self, run: ArmRun) -> None:
        """Keep a run. If that fails, warn once, and continue the comparison."""
        try:
            self._write(f"{file_name(run.label, run.seed)}.json", {"run": run.to_data()})
        except OSError as error:
            if not self._warned:
                self._warned = True
                _messages.warn(
                    f"`compare_precisions` could not write to `{self._folder}`: {error}. It goes on, and the report"
                    " will be complete; but a later call could not continue from here."
                )

    def work_folder(self, label: str, seed: int) -> Path | None:
        """Return the folder for the files that a run itself writes; `None` if the store is not on this machine."""
        return self._folder / file_name(label, seed) if isinstance(self._folder, Path) else None

    def _refuse_another(self, dirpath: Any, identity: Mapping[str, Any]) -> None:
        data = self._read(_PLAN) or {}
        theirs = data.get("comparison")
        if not isinstance(theirs, dict) or data.get("key") == self._key:
            return
        parts = [
            "its `{}`: {}, not {}".format(part, *_where_they_differ(str(theirs.get(part)), str(mine)))
            for part, mine in identity.items()
            if theirs.get(part) != mine
        ]
        raise ValueError(
            f"`dirpath` must be a folder of this comparison, or a new one; {str(dirpath)!r} has another comparison"
            f" ({'; '.join(parts) or 'of another version'}). Use another folder, or remove that one."
        )

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open_to_read(child(self._folder, name), "text") as file:
                data = json.load(file)
        except (FileNotFoundError, ValueError):  # a `ValueError`: the file is half written, or is not text
            return None
        return data if isinstance(data, dict) and data.get("format") == _FORMAT else None

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, "key": self._key, **data}, allow_nan=False)
        write_atomically(child(self._folder, name), lambda file: file.write(text))


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
