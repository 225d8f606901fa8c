"""The watch finds operations that make non-finite values, forward and backward, and leaves no hooks behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from lightning_amp.numerics import fidelity
from lightning_amp.tracing import Key, OperationWatch, _operation_watch

BOUNDARY = "nobody.py"


def watched(function: Callable[[], Tensor], module: nn.Module | None = None, **options: Any) -> OperationWatch:
    with OperationWatch(module or nn.Identity(), BOUNDARY, **options) as watch:
        loss = function()
        watch.note_loss(loss)
        if loss.requires_grad:
            loss.sum().backward()
    return watch


def test_the_first_operation_that_is_not_finite() -> None:
    x = torch.tensor([0.0, 4.0])
    watch = watched(lambda: (x.sqrt() - torch.log(x) + 1).mean())  # noqa: PLW0108
    first = watch.bad[0]
    assert (first.name, first.takes_nonfinite, first.num_nonfinite, first.makes_nan) == ("log", False, 1, False)
    assert (first.dtype, first.shape, first.largest_input) == (torch.float32, (2,), 4.0)
    assert first.key.place is not None
    assert "torch.log(x)" in first.key.place.code
    assert [call.name for call in watch.bad] == ["log", "sub", "add", "mean"]
    assert watch.made_loss is watch.bad[-1]
    assert watch.made_loss.roots == [first]
    assert watch.made_loss.chain == watch.bad


def test_what_is_inside_of_a_library_has_the_line_that_called_it() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        layer[1].weight.fill_(3e38)
    (call, *_) = watched(lambda: layer(torch.full((1, 2), 1e10)), layer).bad
    assert (call.name, call.module) == ("linear", "1")
    assert call.key.place is not None
    assert "layer(torch.full(" in call.key.place.code


def test_a_value_written_in_place_and_seen_through_a_view() -> None:
    x = torch.ones(4)

    def edit() -> Tensor:
        x[1:3].div_(0)
        return x.sum()

    watch = watched(edit)
    assert [call.name for call in watch.bad][:1] == ["div_"]
    assert watch.made_loss is not None
    assert watch.made_loss.roots[0].name == "div_"
    assert watch.bad[0].largest_input == 1  # as it was before


def test_the_backward_that_is_not_finite() -> None:
    x = torch.zeros(3, requires_grad=True)
    watch = watched(lambda: (x * 2).sqrt().sum())
    assert watch.bad == []
    found = watch.first_backward
    assert found is not None
    assert (found.call.name, found.is_sum, found.largest) == ("sqrt", False, 1.0)
    assert found.call.smallest is not None
    assert float(found.call.smallest) == 0


def test_the_backward_of_one_branch_only() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    found = watched(lambda: (torch.where(x > 0, x, 1.0).log() + x**0.5).sum()).first_backward  # noqa: PLW0108
    assert found is not None
    assert found.call.name == "pow"


def test_gradients_whose_sum_is_too_large() -> None:
    x = torch.full((1,), 0.5, dtype=torch.float16, requires_grad=True)

    def loss() -> Tensor:
        y = x * 1
        return (y * 4e4 + y * 4e4).float()

    found = watched(loss).first_backward
    assert found is not None
    assert (found.call.name, found.is_sum) == ("mul", True)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.inf


def test_a_function_of_the_users_own() -> None:
    x = torch.ones(1, requires_grad=True)
    found = watched(lambda: Explodes.apply(x * 2) * 1).first_backward  # type: ignore[operator]
    assert found is not None
    assert found.call.name == "Explodes"


def test_an_edit_takes_the_place_of_an_operation() -> None:
    x = torch.zeros(2)
    first = watched(lambda: x.log().mean()).bad[0].key
    edits = {(first.name, None): lambda func, args, kwargs: func(args[0] + 1, **kwargs)}
    assert watched(lambda: x.log().mean(), edits=edits).bad != []  # it is about one line
    place = None

    def loss() -> Tensor:
        return x.log().mean()

    place = watched(loss).bad[0].key.place
    assert watched(loss, edits={("log", place): edits["log", None]}).bad == []


def test_finite_operations_are_measured_on_request() -> None:
    x = torch.tensor([-3.0, 2.0])

    def loss() -> Tensor:
        return x.exp().sum()

    place = watched(lambda: x.log().sum()).bad[0].key.place
    assert place is not None
    key = Key("exp", place._replace(line=loss.__code__.co_firstlineno + 1), 0)
    watch = watched(loss, wanted=[key])
    assert watch.bad == []
    assert watch.measured[key].largest_output == pytest.approx(float(x.exp().max()))


def test_composites_are_named_as_the_user_wrote_them() -> None:
    logits, labels = torch.full((2, 3), torch.nan), torch.zeros(2, dtype=torch.long)
    logits[:] = 1e38
    watch = watched(lambda: F.cross_entropy(logits * 10, labels))
    assert [call.name for call in watch.bad] == ["mul", "cross_entropy"]


def test_nothing_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    with OperationWatch(nn.Identity(), BOUNDARY) as watch:
        y = (x / 0).sum()
    y.backward()
    assert watch.first_backward is None
    assert watch.maker(y) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
        lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
        lambda p: p.grad.norm().log(),
        lambda p: p.grad.clone().mul_(2).sum(),
        lambda p: p.grad.add_(1),
    ],
)
def test_what_code_computes_of_gradients_is_no_cause(use: Callable[[nn.Parameter], Any]) -> None:
    """The backward made the infinities, and the watch names it; their norm is infinite in any precision."""
    module = nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[torch.inf, 1.0]])
    with OperationWatch(module, BOUNDARY) as watch:
        use(module.weight)
        loss = (module.weight / 0).sum()
    assert not loss.isfinite()
    assert [call.name for call in watch.bad] == ["div", "sum"]


# -- beside a reference ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        angles = (self.fc(x) + 1000).relu()
        return angles.cos()


def _enter(running: list[str], name: str, *_: Any) -> None:
    running.append(name)


def _leave(running: list[str], *_: Any) -> None:
    running.pop()


def both(net: nn.Module, x: Tensor) -> tuple[OperationWatch, OperationWatch]:
    running: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_pre_hook(partial(_enter, running, name))
        module.register_forward_hook(partial(_leave, running))
    with OperationWatch(None, BOUNDARY, running=running) as fp32:
        net(x)
    with (
        OperationWatch(None, BOUNDARY, running=running, reference=fp32) as amp,
        torch.autocast("cpu", torch.bfloat16),
    ):
        net(x)
    return fp32, amp


def test_each_operation_beside_its_reference_has_its_line_and_its_makers() -> None:
    fp32, amp = both(Net(), torch.randn(16, 4))
    assert [call.name for call in amp.calls] == [call.name for call in fp32.calls] == ["linear", "add", "relu", "cos"]
    assert [call.module for call in amp.calls] == ["fc", None, None, None]
    cos = amp.calls[-1]
    assert cos.key.place is not None
    assert cos.key.place.code == "return angles.cos()"
    assert [maker.name for maker in cos.makers] == ["relu"]
    assert cos.beside is not None
    assert cos.beside.reference is fp32.calls[-1]
    assert cos.beside.sums is not None
    assert float(fidelity(cos.beside.sums[:3])[0]) < 10
    assert amp.calls[0].beside is not None
    assert amp.calls[0].beside.takes_exact


def test_where_a_result_beside_its_reference_is_not_finite() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.log(x.relu() * 0)
            return (y * 0 == y).float()

    fp32, _ = both(Bad(), torch.randn(4, 4))
    found = [(call.beside.written, call.beside.is_bad, call.beside.takes_bad) for call in fp32.calls if call.beside]
    assert found == [
        ("relu", False, False), ("mul", False, False), ("log", True, False), ("mul", True, False),
        ("__eq__", False, True), ("float", False, False),
    ]  # fmt: skip
    assert fp32.calls[4].beside is not None
    assert fp32.calls[4].beside.is_blameless


def test_a_collective_operation_takes_what_arrives_from_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns before these values have arrived."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(_operation_watch, "_arrived", lambda result: result.fill_(torch.nan))
    try:
        group = torch.distributed.group.WORLD
        watch = watched(lambda: all_reduce(torch.ones(4), "sum", group) + 1)
    finally:
        torch.distributed.destroy_process_group()
    first = watch.bad[0]
    assert (first.name, first.takes_nonfinite, first.sources) == ("all_reduce", True, [])
