"""The settings of Accelerate, which one process can choose only once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def own_accelerate() -> Generator[None]:
    """Forget at the end the settings that an `Accelerator` made here has left in its classes and in the environment."""
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            if (state := sys.modules.get("accelerate.state")) is not None:
                reset: Any = state.AcceleratorState._reset_state
                reset(reset_partial_state=True)
