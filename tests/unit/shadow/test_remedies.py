"""What is tried, in which order, until it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp.reports import Remedy
from lightning_amp.shadow._remedies import (
    Trial,
    Trials,
    calls_like,
    trials_in_any_precision,
    trials_in_half,
    trials_of_scale,
)
from lightning_amp.tracing import Key, Operation, OperationCall, Place
from lightning_amp.tracing._operation_calls import Facts, facts_of

PLACE = Place("losses.py", 7)


def tried(trials: Trials, works: Callable[[Trial], bool] = lambda _: False) -> list[Remedy]:
    found: list[Remedy] = []
    trial = next(trials, None)
    while trial is not None:
        worked = works(trial)
        found.append(trial.remedy._replace(worked=worked))
        try:
            trial = trials.send(worked)
        except StopIteration:
            break
    return found


def planted(name: str, kind: str = "", module: str | None = "attn.proj") -> tuple[Operation, OperationCall]:
    operation = Operation(name, file="losses.py", line=7, module=module, kind=kind)
    return operation, OperationCall(Key(name, PLACE, 0), 0, module)


def test_modules_are_widened_until_it_works() -> None:
    operation, call = planted("matmul")
    found = tried(
        trials_in_half("fp16", ["bf16", "fp16", "fp32"], operation, call, ["attn.proj", "attn.drop", "head", "loss"])
    )
    assert [(r.kind, r.values) for r in found] == [
        ("bf16", ()),
        ("fp32_modules", ("attn.proj",)),
        ("fp32_modules", ("attn.proj", "attn.drop")),
        ("fp32_modules", ("attn.proj", "attn.drop", "head")),
        ("fp32_modules", ("attn",)),
        ("operation in fp32", ()),
        ("operation without autocast", ()),
    ]
    works = tried(trials_in_half("fp16", ["fp16"], operation, call, []), lambda trial: trial.rules != ())
    assert [r.kind for r in works if r.worked] == ["fp32_modules"]
    assert sum(r.kind == "fp32_modules" for r in works) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bf16_is_not_tried_in_bf16(precision: str) -> None:
    operation, call = planted("exp", module="")
    kinds = {r.kind for r in tried(trials_in_half(precision, ["bf16"], operation, call, []))}
    assert kinds == {"clamp", "operation in fp32", "operation without autocast"}
    assert tried(trials_in_half("fp32", ["bf16"], operation, call, [])) == []


def test_scales_fall_and_become_divisors() -> None:
    found = tried(trials_of_scale(2.0**16, 2.0**20), lambda trial: trial.scale is not None and trial.scale < 2.0**10)
    assert [(r.kind, r.values[0]) for r in found] == [("scale", 2.0**15), ("scale", 2.0**13), ("scale", 2.0**9)]
    (last,) = tried(trials_of_scale(2.0**16, 2.0**-3), lambda _: True)
    assert (last.kind, last.values) == ("divisor", (8.0,))


@pytest.mark.parametrize(
    ("name", "args", "finite"),
    [
        ("log1p", (torch.tensor([-1.0]),), torch.log1p),
        ("log1p", (torch.tensor([-2.0]),), torch.log1p),
        ("acos", (torch.tensor([-1.5, 1.5]),), torch.acos),
        ("logit", (torch.tensor([0.0, 1.0]),), torch.logit),
        ("div", (torch.ones(2), torch.tensor([0.0, -2.0])), torch.div),
        ("reciprocal", (torch.tensor([0.0]),), torch.reciprocal),
        ("log", (torch.tensor([0.0]),), torch.log),
        ("sqrt", (torch.tensor([-1.0]),), torch.sqrt),
        ("atanh", (torch.tensor([1.0, -1.0]),), torch.atanh),
    ],
)
def test_an_epsilon_keeps_it_finite(name: str, args: Any, finite: Callable[..., Tensor]) -> None:
    operation, call = planted(name, facts_of(name, args, {}).kind)

    def works(trial: Trial) -> bool:
        (edit,) = trial.edits.values()
        return bool(edit(finite, args, {}).isfinite().all())

    found = tried(trials_in_any_precision(operation, call), works)
    assert [r.kind for r in found if r.worked] == ["epsilon"]
    assert not finite(*args).isfinite().all()


def test_a_divisor_keeps_its_sign() -> None:
    operation, call = planted("div", "zero")
    trial = next(trials_in_any_precision(operation, call))
    (edit,) = trial.edits.values()
    assert (edit(torch.div, (torch.ones(2), torch.tensor([-2.0, 2.0])), {}) * torch.tensor([-1.0, 1.0]) > 0).all()


def test_a_mask_that_is_finite() -> None:
    operation, call = planted("softmax", "masked")
    trial = next(trials_in_any_precision(operation, call))
    (edit,) = trial.edits.values()
    assert edit(torch.softmax, (torch.full((2, 3), -torch.inf), -1), {}).isfinite().all()


def test_nothing_is_tried_where_nothing_is_known() -> None:
    assert tried(trials_in_any_precision(None, None)) == []
    assert tried(trials_in_any_precision(*planted("linear"))) == []


def test_an_epsilon_is_added_as_the_advice_says() -> None:
    """A clamp would hide the gradient, which is as large as 1 / epsilon, and may not fit."""
    operation, call = planted("log", "zero")

    def works(trial: Trial) -> bool:
        (edit,) = trial.edits.values()
        x = torch.zeros(1, dtype=torch.float16, requires_grad=True)
        edit(torch.log, (x,), {}).backward()
        assert x.grad is not None
        return bool(x.grad.isfinite().all())

    found = tried(trials_in_any_precision(operation, call), works)
    assert [(r.values[0], r.worked) for r in found] == [(1e-8, False), (1e-6, False), (1e-4, True)]


def test_what_fails_alike_on_other_lines_is_mended_there_too() -> None:
    operation, call = planted("log", "zero")
    calls = [OperationCall(Key(name, Place("losses.py", line), 0), line, "") for name, line in
             (("log", 7), ("log", 9), ("log", 9), ("div", 9), ("log", 11), ("log", 12))]  # fmt: skip
    for one in (call, *calls):
        one.facts = Facts("zero")
    calls[-1].takes_nonfinite, calls[-2].facts = True, Facts("negative")
    alike = calls_like(call, calls)
    assert [other.key.place for other in alike] == [Place("losses.py", 9)]
    trial = next(trials_in_any_precision(operation, call, alike))
    assert list(trial.edits) == [("log", PLACE), ("log", Place("losses.py", 9))]
    assert trial.remedy.values == (1e-8, "losses.py:9")
