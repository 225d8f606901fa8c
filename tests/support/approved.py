"""Printed texts as files that a person reads: `make approve` writes them anew, and `git diff` shows what changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "approved"


def assert_approved(name: str, texts: Mapping[str, str]) -> None:
    """Compare texts, each under its heading, with the file `approved/<name>.txt`."""
    path = FOLDER / f"{name}.txt"
    printed = "\n\n".join(f"## {heading}\n{text.rstrip()}" for heading, text in texts.items()) + "\n"
    if os.environ.get("APPROVE"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8"), f"run `make approve` if {path.name} should change"
