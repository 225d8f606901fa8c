"""Read and write files of records: JSON with one record a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_amp._files import write_atomically

T = TypeVar("T")


def read_lines(path: Path, from_dict: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read a file of records. A torn last line is ignored, and a missing file has no records.

    Args:
        path: The file.
        from_dict: Makes a record from its fields.

    Raises:
        ValueError: If another line is no record; it says which.

    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line.strip().rstrip(",")) for number, line in enumerate(lines, 1)]
    numbered = [(number, line) for number, line in numbered if line not in ("", "[", "]")]
    records: list[T] = []
    for number, line in numbered:
        try:
            records.append(from_dict(json.loads(line)))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            if number == numbered[-1][0] and not lines[-1].startswith("]"):
                break
            raise ValueError(
                f"Line {number} of {path} must be a record of this benchmark, got {line[:80]!r} ({error!r})."
                " Remove the line; its run is then done again."
            ) from error
    return records


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of records atomically."""
    text = "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n"
    write_atomically(path, lambda file: file.write(text))
