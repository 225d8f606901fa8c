"""One line on the terminal that says how far the doctor is."""

from __future__ import annotations

import sys
import time

from typing_extensions import final


@final
class Progress:
    """Writes over its own line on standard error, and takes it away at the end; silent where that is no terminal."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._began_s = time.perf_counter()
        self._width = 0
        self._is_on = self._stream is not None and self._stream.isatty()

    def __call__(self, text: str) -> None:
        """Show what is being done."""
        if not self._is_on:
            return
        line = f"doctor: {text} ({time.perf_counter() - self._began_s:.0f} s)"[:79]
        self._stream.write(f"\r{line:<{self._width}}")
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on and self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()
