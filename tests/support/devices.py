"""Which device the tests run on, and the path that a device takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

DEVICE = os.environ.get("LIGHTNING_AMP_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def flags_on_a_device() -> Generator[None, None, None]:
    """The CPU takes a GPU's path: without this the host reads each flag, since on the CPU that costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_amp.scaling._skip.in_host_memory", lambda scalar: False)
        yield


def run_scenarios(scenarios: dict[str, Callable[[], Any]], wanted: Sequence[str]) -> dict[str, Any]:
    """For scripts with many of them: the results by name; none wanted means all. Fused ones take a GPU's path."""
    results: dict[str, Any] = {}
    for name, run in scenarios.items():
        if not wanted or name in wanted:
            on_a_device = "fused" in name and "unfused" not in name
            with flags_on_a_device() if on_a_device else contextlib.nullcontext():
                results[name] = run()
    return results
