"""What is written about `doctor` runs on this machine, which is examined once for all of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest


@functools.cache
def examined(*arguments: Any, **settings: Any) -> Any:
    from lightning_amp.advice import _machine

    return _machine.examine(*arguments, **settings)


@pytest.fixture(autouse=True)
def one_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_amp.advice import _doctor

    monkeypatch.setattr(_doctor, "examine", examined)
