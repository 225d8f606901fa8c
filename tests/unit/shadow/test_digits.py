"""What is tried where an argument was rounded to 0: it is what the advice says, and it works where the advice does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.reports import Remedy
from lightning_amp.shadow._digits import trials_of_digits, trials_of_logits
from lightning_amp.shadow._remedies import Trials, calls_like
from lightning_amp.tracing import OperationWatch, operation


class Loss(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of
        self.squash = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self, x)


def saturated(module: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return torch.log(1 - p).mean()


def in_a_module(module: Any, x: Tensor) -> Tensor:
    p = module.squash(x)
    return torch.log1p(-p).mean()


def vanished(module: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(-2 * x)
    return p.log().mean()


def both(module: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return (torch.log(1 - p) + torch.log(p)).mean()


def tangent(module: Any, x: Tensor) -> Tensor:
    a = torch.tanh(x)
    return torch.log(1 - a * a).mean()


def other(module: Any, x: Tensor) -> Tensor:
    return torch.log(torch.relu(-x)).mean() + torch.sigmoid(x).mean()


def tried(of: Any, dtype: torch.dtype, logits: float = 9.0, trials: Any = trials_of_digits) -> list[Remedy]:
    module = Loss(of)

    def run(trial: Any = None) -> tuple[Tensor, OperationWatch]:
        with OperationWatch(module, "nowhere.py", edits=trial.edits if trial else None) as watch:
            return module(torch.full((4,), logits, dtype=dtype)), watch

    _, watch = run()
    call = watch.bad[0]
    found: list[Remedy] = []
    asked: Trials = trials(operation(module, call), call) if trials is trials_of_digits else trials(call)
    trial = next(asked, None)
    while trial is not None:
        worked = bool(trial.rules) or bool(run(trial)[0].isfinite())
        found.append(trial.remedy._replace(worked=worked))
        try:
            trial = asked.send(worked)
        except StopIteration:
            break
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("of", "name"), [(saturated, "sigmoid"), (in_a_module, "sigmoid"), (tangent, "tanh")])
def test_the_operation_that_lost_the_digits_is_found(of: Any, name: str, dtype: torch.dtype) -> None:
    logits = 9.0 if name == "sigmoid" else 5.0
    *failed, last = [remedy for remedy in tried(of, dtype, logits) if remedy.kind == "source in fp32"]
    assert last.worked
    assert last.values[0] == name
    assert "test_digits.py:" in last.values[1]
    assert not any(remedy.worked for remedy in failed), "the latest that helps"
    assert [remedy.values[0] for remedy in failed][:1] == (["neg"] if of is in_a_module else ["sub"])


def test_a_module_of_its_own_is_tried_in_fp32() -> None:
    rules = [remedy.values for remedy in tried(in_a_module, torch.float16) if remedy.kind == "fp32_modules"]
    assert rules == [("squash",)]


def test_what_is_0_in_float32_too_has_lost_no_digits() -> None:
    assert not any(remedy.worked for remedy in tried(other, torch.float16))
    assert tried(other, torch.float32) == []
    assert list(trials_of_digits(None, None)) == []


@pytest.mark.parametrize(
    ("of", "logits", "form"),
    [(saturated, 40.0, "-x"), (in_a_module, 40.0, "-x"), (vanished, 60.0, "x"), (both, 40.0, "-x")],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logsigmoid_stands_in_for_the_logarithm_of_a_sigmoid(of: Any, logits: float, form: str, dtype: Any) -> None:
    assert tried(of, dtype, logits, trials_of_logits) == [Remedy("logsigmoid", (form,), True)]


def test_it_is_not_tried_on_another_logarithm() -> None:
    assert tried(other, torch.float16, trials=trials_of_logits) == []
    assert tried(tangent, torch.float16, trials=trials_of_logits) == []
    assert list(trials_of_logits(None)) == []


def test_a_logarithm_that_only_looks_like_it_stays_as_it_is() -> None:
    def square(module: Any, x: Tensor) -> Tensor:
        p = torch.sigmoid(x)
        return torch.log(1 - p * p).mean()

    def twice(module: Any, x: Tensor) -> Tensor:
        p = torch.sigmoid(x)
        return torch.log(2 - p - p).mean()

    assert tried(square, torch.float32, 40.0, trials_of_logits) == []
    assert tried(twice, torch.float32, 40.0, trials_of_logits) == []


def test_the_one_that_lost_the_digits_is_not_always_the_one_to_mend() -> None:
    """The epsilon is lost in the sum; the gradient is finite if all is in float32 from the product on."""

    def normalised(module: Any, x: Tensor) -> Tensor:
        z = x * 0
        norm = z.abs() + 1e-8
        return (z / norm).mean()

    module = Loss(normalised)
    with OperationWatch(module, "nowhere.py") as watch:
        module(torch.ones(3, dtype=torch.float16))
    call = watch.bad[0]
    asked = trials_of_digits(operation(module, call), call)
    trial, values = next(asked), list[Any]()
    for worked in (False, True):
        with OperationWatch(module, "nowhere.py", edits=trial.edits):
            module(torch.ones(3, dtype=torch.float16))
        values.append(trial.remedy.values)
        trial = next(asked, trial) if worked else asked.send(worked)
    assert [value[0] for value in values] == ["add", "abs"]
    assert all("+ 1e-8" in value[3] and value[2] == "add" for value in values)


def test_what_fails_alike_on_other_lines_is_tried_there_too() -> None:
    def twice(module: Any, x: Tensor) -> Tensor:
        p, q = torch.sigmoid(x), torch.sigmoid(x + 1)
        first = torch.log(1 - p).mean()
        return first + torch.log(1 - q).mean()

    module = Loss(twice)
    for dtype, logits in ((torch.float16, 9.0), (torch.float32, 40.0)):
        with OperationWatch(module, "nowhere.py") as watch:
            module(torch.full((3,), logits, dtype=dtype))
        call = watch.bad[0]
        alike = calls_like(call, watch.bad)
        trial = next(trials_of_logits(call, alike))
        with OperationWatch(module, "nowhere.py", edits=trial.edits):
            assert bool(module(torch.full((3,), logits, dtype=dtype)).isfinite())
        assert trial.remedy.values[0] == "-x"
        assert trial.remedy.values[1].startswith("test_digits.py:")
