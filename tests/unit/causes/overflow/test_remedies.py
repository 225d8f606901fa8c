"""Remedies: which ones are tried, in which order, and whether each edit does what the advice says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support.source import PACKAGE
from torch import Tensor, nn

from lightning_amp.causes.overflow._remedies import Case, calls_like, try_remedies
from lightning_amp.findings import Remedy, RemedyKind
from lightning_amp.shadow import Lockstep
from lightning_amp.tracing import Diagnosis, Key, Operation, OperationCall, OperationWatch, Place, operation
from lightning_amp.tracing._operation_calls import Facts, facts_of

PLACE = Place("losses.py", 7)
Works = Callable[[dict[str, Any]], bool]


class Alone:
    world_size = 1


def tried(works: Works = lambda how: False, *, cause: Any = "loss", in_fp32: Any = "finite", **facts: Any) -> Any:
    """Return the remedies tried on a step; `works` gets the arguments of each run and returns whether it is finite."""
    ranks: Any = Alone()
    operation, call = facts.pop("of", (None, None))
    given: dict[str, Any] = {
        "alike": (), "takers": (), "precision": "fp16", "choices": ["bf16", "fp16", "fp32"], "scale": 2.0**16,
        "fitting": 2.0**20, **facts,
    }  # fmt: skip
    found = Diagnosis(cause, in_fp32=in_fp32, operation=operation)
    return try_remedies(Lockstep(ranks), Case(found, call, is_finite=lambda **how: works(how), **given))


def planted(name: str, kind: str = "", module: str | None = "attn.proj") -> tuple[Operation, OperationCall]:
    operation = Operation(name, file="losses.py", line=7, module=module, kind=kind)
    return operation, OperationCall(Key(name, PLACE, 0), 0, module, name)


@pytest.mark.parametrize("kind", get_args(RemedyKind)[1:])
def test_each_kind_of_remedy_is_tried_and_has_words(kind: str) -> None:
    tried, *words = (
        PACKAGE.files[path].text
        for path in ("causes/overflow/_remedies.py", "reports/_overflow_words.py", "reports/_overflow_report.py")
    )
    assert f'Remedy("{kind}"' in tried
    assert any(f'"{kind}"' in text for text in words)


def test_modules_are_widened_until_it_works() -> None:
    found = tried(of=planted("matmul"), takers=["attn.proj", "attn.drop", "head", "loss"])
    assert [(r.kind, r.values) for r in found] == [
        ("bf16", ()),
        ("fp32_modules", ("attn.proj",)),
        ("fp32_modules", ("attn.proj", "attn.drop")),
        ("fp32_modules", ("attn.proj", "attn.drop", "head")),
        ("fp32_modules", ("attn",)),
        ("operation in fp32", ()),
        ("operation without autocast", ()),
    ]
    works = tried(lambda how: "rules" in how, of=planted("matmul"), choices=["fp16"])
    assert [r.kind for r in works if r.worked] == ["fp32_modules"]
    assert sum(r.kind == "fp32_modules" for r in works) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bf16_is_not_tried_in_bf16(precision: str) -> None:
    kinds = {r.kind for r in tried(of=planted("exp", module=""), precision=precision)}
    assert kinds == {"clamp", "operation in fp32", "operation without autocast"}
    assert tried(of=planted("exp", module=""), precision="fp32") == []


def test_scales_fall_and_become_divisors() -> None:
    found = tried(lambda how: how.get("scale", 2.0**16) < 2.0**10, cause="backward")
    assert found == [
        Remedy("scale", (2.0**15,)), Remedy("scale", (2.0**13,)), Remedy("scale", (2.0**9,), True),
    ]  # fmt: skip
    (last,) = tried(lambda how: True, cause="backward", fitting=2.0**-3)
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
    def works(how: dict[str, Any]) -> bool:
        (edit,) = how["edits"].values()
        return bool(edit(finite, args, {}).isfinite().all())

    found = tried(works, in_fp32="not finite", of=planted(name, facts_of(name, args, {}).kind))
    assert [r.kind for r in found if r.worked] == ["epsilon"]
    assert not finite(*args).isfinite().all()


def keeps_its_sign(edit: Any) -> bool:
    return edit(torch.div, (1, torch.tensor([-2.0, 2.0])), {}).sign().tolist() == [-1, 1]


def masks_finitely(edit: Any) -> bool:
    return bool(edit(torch.softmax, (torch.full((2, 3), -torch.inf), -1), {}).isfinite().all())


@pytest.mark.parametrize(
    ("name", "kind", "works"), [("div", "zero", keeps_its_sign), ("softmax", "masked", masks_finitely)]
)
def test_the_first_that_is_tried_works(name: str, kind: str, works: Any) -> None:
    found = tried(lambda how: works(*how["edits"].values()), in_fp32="not finite", of=planted(name, kind))
    assert [remedy.worked for remedy in found] == [True]


def test_without_a_fitting_operation_nothing_is_tried() -> None:
    assert tried(in_fp32="not finite") == []
    assert tried(in_fp32="not finite", of=planted("linear")) == []
    assert tried(in_fp32="not finite", cause="batch", of=planted("log", "zero")) == []


def test_an_epsilon_is_added_as_the_advice_says() -> None:
    """A clamp would hide the gradient, which is as large as 1 / epsilon and may overflow."""

    def works(how: dict[str, Any]) -> bool:
        (edit,) = how["edits"].values()
        x = torch.zeros(1, dtype=torch.float16, requires_grad=True)
        edit(torch.log, (x,), {}).backward()
        assert x.grad is not None
        return bool(x.grad.isfinite().all())

    found = tried(works, in_fp32="not finite", of=planted("log", "zero"))
    assert [(r.values[0], r.worked) for r in found] == [(1e-8, False), (1e-6, False), (1e-4, True)]


def test_operations_that_fail_alike_on_other_lines_get_the_same_edit() -> None:
    operation, call = planted("log", "zero")
    calls = [OperationCall(Key(name, Place("losses.py", line), 0), line, "", name) for name, line in
             (("log", 7), ("log", 9), ("log", 9), ("div", 9), ("log", 11), ("log", 12))]  # fmt: skip
    for one in (call, *calls):
        one.facts = Facts("zero")
    calls[-1].takes_nonfinite, calls[-2].facts = True, Facts("negative")
    alike = calls_like(call, calls)
    assert [other.key.place for other in alike] == [Place("losses.py", 9)]
    edited: list[Any] = []
    found = tried(
        lambda how: edited.append(list(how["edits"])) is None, in_fp32="not finite", of=(operation, call), alike=alike
    )
    assert edited == [[("log", PLACE), ("log", Place("losses.py", 9))]]
    assert found == [Remedy("epsilon", (1e-8, "losses.py:9"), True)]


# -- digits that half precision has lost -------------------------------------------------------------------------------


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


def twice(module: Any, x: Tensor) -> Tensor:
    p, q = torch.sigmoid(x), torch.sigmoid(x + 1)
    first = torch.log(1 - p).mean()
    return first + torch.log(1 - q).mean()


def tangent(module: Any, x: Tensor) -> Tensor:
    a = torch.tanh(x)
    return torch.log(1 - a * a).mean()


def other(module: Any, x: Tensor) -> Tensor:
    return torch.log(torch.relu(-x)).mean() + torch.sigmoid(x).mean()


def square(module: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return torch.log(1 - p * p).mean()


def difference(module: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return torch.log(2 - p - p).mean()


def normalised(module: Any, x: Tensor) -> Tensor:
    z = x * 0
    norm = z.abs() + 1e-8
    return (z / norm).mean()


def tried_on(of: Any, dtype: torch.dtype, logits: float, in_fp32: Any = "finite", *, works: Any = None) -> list[Remedy]:
    """Return the remedies tried on a real loss. `fp32_modules` always work; `works`, if given, has all results."""
    module = Loss(of)

    def run(edits: Any = None) -> tuple[Tensor, OperationWatch]:
        with OperationWatch(module, "nowhere.py", edits=edits) as watch:
            return module(torch.full((4,), logits, dtype=dtype)), watch

    def is_finite(how: dict[str, Any]) -> bool:
        finite = "rules" in how or ("edits" in how and bool(run(how["edits"])[0].isfinite()))
        return finite if works is None else next(works)

    _, watch = run()
    call = watch.bad[0]
    alike = calls_like(call, watch.bad)
    return tried(is_finite, in_fp32=in_fp32, of=(operation(module, call), call), alike=alike, precision="bf16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("of", "name"), [(saturated, "sigmoid"), (in_a_module, "sigmoid"), (tangent, "tanh")])
def test_the_operation_that_lost_the_digits_is_found(of: Any, name: str, dtype: torch.dtype) -> None:
    found = tried_on(of, dtype, 9.0 if name == "sigmoid" else 5.0)
    *failed, last = [remedy for remedy in found if remedy.kind == "source in fp32"]
    assert last.worked
    assert last.values[0] == name
    assert "test_remedies.py:" in last.values[1]
    assert not any(remedy.worked for remedy in failed), "the search ends with the first source that works"
    assert [remedy.values[0] for remedy in failed][:1] == (["neg"] if of is in_a_module else ["sub"])
    rules = [remedy.values for remedy in found if remedy.kind == "fp32_modules"]
    assert rules == ([("squash",)] if of is in_a_module else []), "a source in another module is also tried as a rule"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_argument_that_is_0_in_float32_too_was_not_rounded(dtype: torch.dtype) -> None:
    found = [remedy for remedy in tried_on(other, dtype, 9.0) if remedy.kind == "source in fp32"]
    assert not any(remedy.worked for remedy in found)
    assert bool(found) == (dtype == torch.float16)


@pytest.mark.parametrize(
    ("of", "logits", "form"),
    [(saturated, 40.0, "-x"), (in_a_module, 40.0, "-x"), (vanished, 60.0, "x"), (both, 40.0, "-x")],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logsigmoid_stands_in_for_the_logarithm_of_a_sigmoid(of: Any, logits: float, form: str, dtype: Any) -> None:
    assert tried_on(of, dtype, logits, "not finite")[0] == Remedy("logsigmoid", (form,), True)


@pytest.mark.parametrize("of", [other, tangent, square, difference])
def test_logsigmoid_is_not_tried_on_another_logarithm(of: Any) -> None:
    assert "logsigmoid" not in {remedy.kind for remedy in tried_on(of, torch.float32, 40.0, "not finite")}


@pytest.mark.parametrize(("dtype", "logits"), [(torch.float16, 9.0), (torch.float32, 40.0)])
def test_logsigmoid_is_tried_on_all_lines_that_fail_alike(dtype: torch.dtype, logits: float) -> None:
    first = tried_on(twice, dtype, logits, "not finite")[0]
    assert (first.kind, first.values[0], first.worked) == ("logsigmoid", "-x", True)
    assert first.values[1].startswith("test_remedies.py:")


def test_the_operation_that_rounds_is_not_always_the_one_to_compute_in_float32() -> None:
    """The sum rounds the epsilon away; the gradient is finite if everything from the product on is in float32."""
    found = tried_on(normalised, torch.float16, 1.0, works=iter([False, True, *[False] * 20]))
    values = [remedy.values for remedy in found if remedy.kind == "source in fp32"]
    assert [value[0] for value in values] == ["add", "abs"]
    assert all("+ 1e-8" in value[3] and value[2] == "add" for value in values)
