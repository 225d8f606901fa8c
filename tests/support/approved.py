"""Printed texts as files that a person reads: `make approve` writes them anew, and `git diff` shows what changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "approved"


def assert_approved(name: str, texts: Mapping[str, str]) -> None:
    """Compare texts, each under its heading, with the file `approved/<name>.txt`."""
    path = FOLDER / f"{name}.txt"
    printed = "\n\n".join(f"## {heading}\n{text.rstrip()}" for heading, text in texts.items()) + "\n"
    if os.environ.get("APPROVE"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8"), f"run `make approve` if {path.name} should change"


def assert_refused(name: str, call: Callable[..., Any], wrong: Iterable[Mapping[str, Any]]) -> None:
    """Compare the errors for wrong arguments with `approved/refusals_<name>.txt`. Each is a `ValueError`.

    Addresses of objects are left out, and so are lists of names that another version of Lightning would extend.
    """
    texts: dict[str, str] = {}
    for arguments in wrong:
        with pytest.raises(ValueError) as caught:
            call(**arguments)
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        heading, text = (re.sub(r" at 0x[0-9a-f]+", "", one) for one in (given, str(caught.value)))
        texts[heading] = re.sub(r"(It knows) .*", r"\1 ...", text)
    assert_approved(f"refusals_{name}", texts)
