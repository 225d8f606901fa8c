"""The command `lightning-amp`: what to do with saved records, and which precision to use, without writing Python.

Read `_main.py` first.
"""

from lightning_amp.cli._main import main

__all__ = ["main"]
