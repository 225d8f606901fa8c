"""The command `lightning-amp`: choose a precision and read saved records without writing Python.

Read `_main.py` first.
"""

from lightning_amp.cli._main import main

__all__ = ["main"]
