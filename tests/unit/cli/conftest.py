"""Run a command line in this process, with a stand-in for the function that the command calls."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

import lightning_amp
from lightning_amp.cli import main


class StandIn:
    """Replaces a function of the package: keeps its arguments by name, and returns or raises `outcome`."""

    def __init__(self, function: Callable[..., Any], outcome: Any, *, other_process: bool) -> None:
        self.calls: list[dict[str, Any]] = []
        self.outcome = outcome
        self._signature, self._other_process = inspect.signature(function), other_process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(self._signature.bind(*args, **kwargs).arguments)
        self.calls.append(pickle.loads(pickle.dumps(call)) if self._other_process else call)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    def put(name: str, outcome: Any, *, other_process: bool = False, owner: Any = lightning_amp) -> StandIn:
        made = StandIn(getattr(owner, name), outcome, other_process=other_process)
        monkeypatch.setattr(owner, name, made)
        return made

    return put


@pytest.fixture
def command(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command that the test file is named after; return its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = request.path.stem.removeprefix("test_").replace("_", "-")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main([name, *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run
