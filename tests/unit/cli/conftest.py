"""Run a command line in this process, with a stand-in for the function that the command calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

import lightning_amp
from lightning_amp.cli import main


class StandIn:
    """Replaces a function of the package: keeps its arguments by name, and returns or raises `outcome`."""

    def __init__(self, function: Callable[..., Any], outcome: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.outcome = outcome
        self._signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        self.calls.append(given.pop("settings", {}) | given)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    def put(name: str, outcome: Any, owner: Any = lightning_amp) -> StandIn:
        made = StandIn(getattr(owner, name), outcome)
        monkeypatch.setattr(owner, name, made)
        return made

    return put


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; return its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def tests_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a stand-in raises for an exception of this package."""
    monkeypatch.setattr("lightning_amp.cli._output.is_own_project", lambda _: False)
    monkeypatch.setattr("lightning_amp.cli._output.owner_of", lambda _: "ours")
