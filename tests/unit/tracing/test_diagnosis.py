"""Where the first non-finite value arose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.traces import backward
from torch import Tensor, nn

from lightning_amp.numerics import nonfinite_gradients
from lightning_amp.tracing import Diagnosis, Trace, diagnose, nonfinite_entries


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


def test_the_innermost_module_is_named_or_the_one_whose_own_operation_it_was() -> None:
    assert run(net(nn.Sequential(nn.Identity(), Multiply(1e6)))).module == "2.1"
    assert run(net(Nested())).module == "2"
    found = run(net(Before()))
    assert (found.cause, found.module, found.where) == ("forward", "2.inner", "input")


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


def test_loss() -> None:
    found = run(net(), loss_fn=lambda out: out.float().exp().mul(1e30).square().mean())
    assert (found.cause, found.module) == ("loss", None)


def test_backward_at_the_output() -> None:
    found = run(net(), scale=2.0**30)
    assert (found.cause, found.module, found.where, found.dtype) == ("backward", "2", "output", "float16")


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
