"""The words for a step that fails when it runs a second time."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from lightning_amp.shadow._failures import Failure, in_one_line

DISPATCHER = "\nCould not run 'ne' on nested tensors.\n\nCPU: registered at a.cpp:1\nMeta: registered at b.cpp:2\n"


TORCHSCRIPT = "The following operation failed.\nTraceback of TorchScript:\n  x\nRuntimeError: bad shape\n"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("only once", "only once"),
        ("", ""),
        (DISPATCHER, "Could not run 'ne' on nested tensors."),
        (TORCHSCRIPT, "RuntimeError: bad shape"),
    ],
)
def test_an_error_in_one_line(message: str, line: str) -> None:
    assert in_one_line(ValueError(message)) == f"ValueError: {line}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("x"),
        RuntimeError("CUDA out of memory"),
        RuntimeError("can't allocate memory"),
    ],
)
def test_out_of_memory_is_said_without_its_message(error: Exception) -> None:
    assert Failure.of(error, "the step", "the replay") == (True, "out of memory", "out of memory in the replay")


def test_the_cache_of_whatever_device_there_is_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    backend = SimpleNamespace(empty_cache=lambda: emptied.append("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: backend)
    Failure.of(torch.OutOfMemoryError("XPU out of memory"), "the step", "the replay")
    assert emptied == ["xpu"]


def test_another_error_is_named() -> None:
    failure = Failure.of(ValueError("out of memory"), "the step", "the replay")
    assert failure == (
        False,
        "ValueError: out of memory",
        "the step could not be run a second time (ValueError: out of memory)",
    )


def test_what_the_frames_of_an_error_hold_is_free() -> None:
    def fails() -> None:
        large = torch.zeros(1)
        held.append(weakref.ref(large))
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer") from None

    held: list[weakref.ref[torch.Tensor]] = []
    try:
        fails()
    except ValueError as error:
        Failure.of(error, "the step", "the replay")
        assert held[0]() is None
