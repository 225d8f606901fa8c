"""Parse a set of versions: `python==3.12,torch==2.11.0,lightning==2.6.1`, or `lowest,python==3.10`."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT = (
    "lowest,python==3.10",
    "python==3.12,torch==2.11.0,lightning==2.6.1",
    "python==3.11,torch==2.13.0,lightning==2.6.6",
    "python==3.14,torch==2.15.0,lightning==2.6.6",
)


@dataclass(frozen=True)
class Spec:
    """A set of versions.

    Args:
        requirements: As pip takes them.
        python: Version of Python; empty for the one that runs this.
        lowest: Take the lower bound of everything that `pyproject.toml` names.

    """

    requirements: tuple[str, ...]
    python: str = ""
    lowest: bool = False

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse requirements separated by commas; `lowest` is a word of its own."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        python = [part.partition("==")[2] for part in parts if part.startswith("python==")]
        requirements = tuple(p for p in parts if p != "lowest" and not p.startswith("python=="))
        return cls(requirements, python[0] if python else "", "lowest" in parts)

    @property
    def slug(self) -> str:
        """Name a folder."""
        return re.sub(r"[^\w.]+", "-", str(self))

    def __str__(self) -> str:
        python = [f"python=={self.python}"] if self.python else []
        return ",".join([*["lowest"] * self.lowest, *python, *self.requirements])
