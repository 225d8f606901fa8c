"""The argument `fallback`: its legal values, and the precision that a run has reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, FSDPAmpPrecision
from lightning_amp.casting import Choice
from lightning_amp.precision._fallback import Fallback
from lightning_amp.scaling import Saved

CPU = torch.device("cpu")


def names(fallback: Fallback) -> list[str]:
    return [choice.name for choice in fallback.left]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((), []),
        (["bf16", "fp32"], ["bf16", "fp32"]),
        (("fp32", "bf16"), ["fp32", "bf16"]),
        ([torch.bfloat16, 32], ["bf16", "fp32"]),
        (iter(["bf16-mixed", "torch.float32"]), ["bf16", "fp32"]),
    ],
)
def test_takes_all_spellings(value: Any, expected: list[str]) -> None:
    assert names(Fallback(value, "fp16")) == expected


@pytest.mark.parametrize(
    ("precision", "value", "match"),
    [
        ("fp16", "bf16", r"`fallback` must be a sequence of precisions, got 'bf16'. Write `fallback=\['bf16'\]`."),
        ("fp16", 32, r"must be a sequence of precisions, got 32. Write `fallback=\[32\]`."),
        ("fp16", None, "`fallback` must be a sequence of precisions, got None"),
        ("fp16", ["bf16", torch.bfloat16], "`fallback` must name each precision once, got torch.bfloat16 again"),
        ("bf16", ["bf16-mixed"], "`fallback` must differ from `precision='bf16'`, got 'bf16-mixed'"),
        ("fp32", ["bf16", 32], "`fallback` must differ from `precision='fp32'`, got 32"),
        ("fp16", ["auto"], "`fallback` must name precisions, got 'auto'"),
        ("bf16", ["fp16"], "`fallback` must hold 'bf16' or 'fp32', got 'fp16'"),
        ("fp16", ["fp16"], "`fallback` must .* got 'fp16'"),
        ("fp16", ["fp8"], "`fallback.*fp8'"),
        ("fp16", ["tf32"], "`fallback` must be one of .* got 'tf32'"),
    ],
)
def test_refuses_all_else(precision: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AmpPrecision(precision, fallback=value)


def test_fsdp_has_no_such_argument() -> None:
    with pytest.raises(TypeError, match="fallback"):
        FSDPAmpPrecision("fp16", fallback=["bf16"])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("picked", "left", "said"),
    [
        ("fp16", ["bf16", "fp32"], "fallback bf16 then fp32"),
        ("bf16", ["fp32"], "fallback fp32"),
        ("fp32", [], "`fallback` is left unused"),
    ],
)
def test_auto_enters_the_list_where_it_is(picked: str, left: list[str], said: str) -> None:
    fallback = Fallback(["bf16", "fp32"], "auto")
    fallback.begin(Choice.of(picked), CPU, goes_on=False, fitting=True)
    assert (names(fallback), fallback.said) == (left, said)


def test_nothing_is_said_without_it() -> None:
    assert Fallback([], "fp16").said == ""


def test_a_device_that_cannot_run_it_is_refused_before_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.casting._precision_choice.runnable", lambda device: ["fp16", "fp32"])
    fallback = Fallback(["bf16", "fp32"], "fp16")
    assert fallback.begin(Choice.of("fp16"), CPU, goes_on=False, fitting=False) == Choice.of("fp16")
    with pytest.raises(ValueError, match=r"This device \(cpu\) cannot run fallback 'bf16'. It can run: 'fp16', 'fp32'"):
        fallback.begin(Choice.of("fp16"), CPU, goes_on=False, fitting=True)


def go_on(fallback: Fallback) -> Choice:
    changed: list[Choice] = []
    fallback.note_stuck("Because.")
    with pytest.warns(UserWarning, match=r"Because\. Training in 'fp16' is stuck, and goes on in '\w+', without a"):
        fallback.go_on(Choice.of("fp16"), changed.append)
    assert (changed, fallback.why_stuck) == ([fallback.reached], "")
    return changed[0]


def test_a_run_goes_along_it() -> None:
    fallback, start = Fallback(["bf16", "fp32"], "fp16"), Choice.of("fp16")
    assert fallback.state() == {}
    assert fallback.begin(start, CPU, goes_on=False, fitting=True) == start
    assert go_on(fallback) == Choice.of("bf16")
    assert (names(fallback), fallback.state()) == (["fp32"], {"precision": "bf16", "began_in": "fp16"})
    # the same Trainer goes on, another one does not
    assert fallback.begin(start, CPU, goes_on=True, fitting=False) == Choice.of("bf16")
    assert fallback.begin(start, CPU, goes_on=False, fitting=False) == start
    assert fallback.begin(start, CPU, goes_on=True, fitting=True) == Choice.of("bf16")
    assert go_on(fallback) == Choice.of("fp32")
    assert names(fallback) == []
    assert fallback.restart() == start
    assert fallback.begin(start, CPU, goes_on=False, fitting=True) == start
    assert names(fallback) == ["bf16", "fp32"]


def resumed(
    state: dict[str, Any], start: str = "fp16", value: Any = ("bf16", "fp32")
) -> tuple[Fallback, Choice | None]:
    fallback = Fallback(value, "fp16" if start == "fp16" else "auto")
    fallback.begin(Choice.of(start), CPU, goes_on=False, fitting=True)
    return fallback, fallback.resume(Saved(state, "entry"), CPU)


def test_a_checkpoint_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fallback, choice = resumed({"precision": "bf16", "began_in": "fp16"})
        assert (choice, names(fallback)) == (Choice.of("bf16"), ["fp32"])
        assert "was stuck in 'fp16' and fell back to 'bf16', in which it goes on" in caplog.text
        caplog.clear()
        for state in ({}, {"precision": "fp16", "began_in": "fp16"}, {"precision": "fp32", "began_in": "fp32"}):
            assert resumed(state)[1] is None
        assert "fell back" not in caplog.text
        fallback = Fallback(["bf16"], "fp32")
        fallback.begin(Choice.of("fp32"), CPU, goes_on=False, fitting=True)
        assert fallback.resume(Saved({"precision": "bf16", "began_in": "fp16"}, "entry"), CPU) is None
        assert "this one is in 'fp32', as passed" in caplog.text


@pytest.mark.parametrize(
    ("saved", "picked", "expected", "began_in", "said"),
    [
        (("bf16", "bf16"), "fp32", "bf16", "bf16", "goes on in 'bf16', although 'auto' is 'fp32' here"),
        (("fp32", "fp32"), "bf16", "fp32", "fp32", "goes on in 'fp32', although 'auto' is 'bf16' here"),
        (("fp16", "fp16"), "fp32", "fp16", "fp16", "goes on in 'fp16'"),
        (("fp8", "fp8"), "fp32", "bf16", "bf16", "is in 'fp8'; it goes on in 'bf16'"),
        (("fp8", "fp8"), "bf16", None, "bf16", ""),
        (("bf16", "bf16"), "bf16", None, "bf16", ""),
        (("bf16", "fp16"), "fp32", "bf16", "fp16", "was stuck in 'fp16' and fell back to 'bf16', in which it goes on"),
        (("fp32", "bf16"), "fp32", "fp32", "bf16", "was stuck in 'bf16' and fell back to 'fp32', in which it goes on"),
    ],
)
def test_auto_stays_in_the_precision_of_the_checkpoint(
    saved: tuple[str, str],
    picked: str,
    expected: str | None,
    began_in: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fallback, start = Fallback(["bf16", "fp32"], "auto"), Choice.of(picked)
    fallback.begin(start, CPU, goes_on=False, fitting=True)
    state = dict(zip(("precision", "began_in"), saved, strict=True))
    with caplog.at_level("INFO"):
        choice = fallback.resume(Saved(state, "entry"), CPU)
    assert (None if choice is None else choice.name) == expected
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
    now = expected or picked
    assert fallback.state() == {"precision": now, "began_in": began_in}  # the next checkpoint says the same
    for fitting in (False, True):  # the same Trainer again
        assert fallback.begin(start, CPU, goes_on=True, fitting=fitting).name == now
    assert fallback.state() == {"precision": now, "began_in": began_in}
    assert fallback.begin(start, CPU, goes_on=False, fitting=True) == start  # another Trainer
    fallback.resume(Saved(state, "entry"), CPU)
    assert fallback.restart() == start


def test_auto_refuses_a_checkpoint_that_the_device_cannot_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.casting._precision_choice.runnable", lambda device: ["bf16", "fp32"])
    with pytest.raises(ValueError, match="cannot run the checkpoint's precision 'fp16'. It can run: 'bf16', 'fp32'"):
        resumed({"precision": "fp16", "began_in": "fp16"}, start="bf16")


@pytest.mark.parametrize("state", [{"precision": "fp64", "began_in": "fp16"}, {"precision": "bf16", "began_in": 3}])
def test_a_wrong_entry_is_named(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"`entry\.(precision|began_in)` must be the name of a precision"):
        resumed(state)


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(ValueError, match=r"no entry `entry.began_in`"):
        resumed({"precision": "bf16"})
