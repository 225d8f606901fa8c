"""The first non-finite value of a step, and the operation that made it, are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.traces import backward
from torch import Tensor, nn

from lightning_amp.numerics import nonfinite_gradients
from lightning_amp.tracing import (
    Diagnosis,
    OperationWatch,
    Trace,
    blamed_in_fp32,
    blamed_in_half,
    diagnose,
    fp32_throughout,
    nonfinite_entries,
    operation,
)


class Multiply(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class BigBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1e5


class Steep(nn.Module):
    """Harmless forward, large backward."""

    def forward(self, x: Tensor) -> Tensor:
        return BigBackward.apply(x)


class Nested(nn.Module):
    """An operation of its own after its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1e6


class Before(nn.Module):
    """An operation of its own before its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.half() * 1e6)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *middle, nn.Linear(8, 1))


def run(
    module: nn.Module,
    batch: Any = None,
    *,
    scale: float = 1.0,
    loss_fn: Callable[[Tensor], Tensor] = lambda out: out.float().square().mean(),
) -> Diagnosis:
    torch.manual_seed(1)
    batch = torch.randn(4, 8) if batch is None else batch
    with Trace(module) as trace:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(module(batch))
        backward(trace, loss * scale)
    return diagnose(trace, loss, batch)


def test_all_is_well() -> None:
    module = net()
    assert run(module) == Diagnosis("none")
    assert nonfinite_gradients(dict(module.named_parameters())) == ()


def test_forward() -> None:
    found = run(net(Multiply(1e6)))
    assert (found.cause, found.module, found.module_class, found.where) == ("forward", "2", "Multiply", "output")
    assert (found.dtype, found.shape) == ("float16", (4, 8))
    assert found.largest_input is not None
    assert 0 < found.largest_input < 1
    assert found.largest_weight is None


def exploding(out: Tensor) -> Tensor:
    return out.float().exp().mul(1e30).square().mean()


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (net(nn.Sequential(nn.Identity(), Multiply(1e6))), {}, ("forward", "2.1", "output")),
        (net(Nested()), {}, ("forward", "2", "output")),
        (net(Before()), {}, ("forward", "2.inner", "input")),
        (net(), {"loss_fn": exploding}, ("loss", None, None)),
        (net(), {"scale": 2.0**30}, ("backward", "2", "output")),
    ],
    ids=["innermost", "own operation after a child", "own operation before a child", "loss", "backward"],
)
def test_the_module_whose_own_operation_overflowed_is_named(module: Any, options: Any, expected: Any) -> None:
    found = run(module, **options)
    assert (found.cause, found.module, found.where) == expected


def test_weights() -> None:
    module = net()
    module[2].weight.data[0, 3] = float("nan")
    found = run(module)
    assert (found.cause, found.module, found.parameter) == ("weights", "2", "2.weight")
    assert found.largest_weight is not None
    assert 0 < found.largest_weight < 1


def test_batch() -> None:
    batch = torch.randn(4, 8)
    batch[1, 2:4] = float("inf")
    found = run(net(), batch)
    assert (found.cause, found.module, found.entries) == ("batch", "0", (("", 2),))


def test_labels() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.tensor([1.0, float("nan")])}
    with Trace(net()) as trace:
        loss = (trace.module(batch["x"]).sum() - batch["y"]).mean()
        backward(trace, loss)
    found = diagnose(trace, loss, batch)
    assert (found.cause, found.module, found.entries) == ("batch", None, (("['y']", 1),))


def test_backward_of_a_module() -> None:
    found = run(net(Steep()), scale=2.0**8)
    assert (found.cause, found.module, found.module_class, found.where) == ("backward", "2", "Steep", "input")
    assert found.largest_gradient is not None
    assert 0 < found.largest_gradient < 65504


def test_backward_of_a_weight() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).detach() * 0 + 100)

    module = Wide()
    found = run(module, scale=2000.0, loss_fn=lambda out: out.float().sum())
    assert (found.cause, found.module, found.where, found.parameter) == ("backward", "b", "parameter", "b.weight")
    assert nonfinite_gradients(dict(module.named_parameters())) == ("b.weight",)


def test_a_mask_is_not_blamed_when_the_loss_is_finite() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.arange(8) > 3, -torch.inf)

    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    found = run(net(Mask(), Softmax()), scale=2.0**30)
    assert (found.cause, found.module) == ("backward", "4")


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    with Trace(embedding) as trace:
        loss = embedding(torch.tensor([1, 1, 2])).sum()
        backward(trace, loss * torch.inf)
    assert diagnose(trace, loss, None).cause == "backward"
    assert nonfinite_gradients({"w": embedding.weight}) == ("w",)


def test_entries() -> None:
    class Point:
        def __init__(self) -> None:
            self.x = torch.tensor([float("nan")])

    batch = [torch.ones(2), {"a": (torch.tensor([float("inf"), 1.0]), "text")}, Point(), torch.tensor([1])]
    assert nonfinite_entries(batch) == (("[1]['a'][0]", 1), ("[2].x", 1))


# -- the operation to blame, from two runs -----------------------------------------------------------------------------


def watched(function: Callable[[], Tensor], wanted: OperationWatch | None = None) -> OperationWatch:
    keys = [] if wanted is None else [call.key for call in wanted.bad]
    context = nullcontext() if wanted is None else fp32_throughout("cpu")
    with context, OperationWatch(nn.Identity(), "nobody.py", keys) as watch:
        watch.note_loss(function())
    return watch


def test_a_mask_is_not_to_blame_and_what_fp32_holds_is() -> None:
    x, hidden = torch.tensor([300.0, 1.0]), torch.tensor([False, True])

    def loss() -> Tensor:
        masked = x.masked_fill(hidden, -torch.inf)
        square = x.half() * x.half()
        return torch.softmax(masked, -1).sum() + square.sum().float()

    half = watched(loss)
    exact = watched(loss, half)
    assert [call.name for call in half.bad][:2] == ["masked_fill", "mul"]
    call = blamed_in_half(half, exact, half.made_loss)
    assert call is not None
    found = operation(nn.Identity(), call, exact.measured[call.key])
    assert (found.name, found.dtype, found.largest_input, found.largest_in_fp32) == ("mul", "float16", 300, 90_000)
    assert "x.half() * x.half()" in found.code


def test_the_operation_that_makes_nan_of_a_written_infinity_is_to_blame() -> None:
    x = torch.ones(2, 2)

    def all_hidden() -> Tensor:
        return torch.softmax(x.masked_fill(x > 0, -torch.inf), -1).sum()

    watch = watched(all_hidden)
    call = blamed_in_fp32(watch.made_loss, watch.bad)
    assert call is not None
    assert (call.name, call.facts.kind, call.facts.count) == ("softmax", "masked", 2)

    def difference() -> Tensor:
        hidden = x.masked_fill(x > 0, -torch.inf)
        return (hidden - hidden).sum()

    watch = watched(difference)
    call = blamed_in_fp32(watch.made_loss, watch.bad)
    assert call is not None
    assert call.name == "sub"


def test_what_was_computed_is_to_blame_itself() -> None:
    x = torch.zeros(2)
    watch = watched(lambda: (torch.log(x) * x + 1).sum())  # noqa: PLW0108
    call = blamed_in_fp32(watch.made_loss, watch.bad)
    assert call is not None
    assert (call.name, call.facts.kind) == ("log", "zero")


def test_without_a_chain_the_first_that_was_not_written_on_purpose() -> None:
    x = torch.zeros(2)
    watch = watched(lambda: torch.full((2,), torch.inf).sum() * 0 + (1 / x).sum() * 0)
    call = blamed_in_fp32(None, watch.bad)
    assert call is not None
    assert (call.name, call.facts.kind) == ("div", "zero")
