"""A trace watches forwards and gradients, and takes its hooks off."""

from __future__ import annotations

import pytest
import torch
from support.traces import backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.tracing import Trace


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *middle, nn.Linear(8, 1))


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_come_off(fails: bool) -> None:
    module = net()

    def hooks() -> list[int]:
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        counts = [len(getattr(m, name)) for m in module.modules() for name in names]
        return counts + [len(p._backward_hooks or ()) for p in module.parameters()]

    before = hooks()
    if fails:
        with pytest.raises(ZeroDivisionError), Trace(module):
            raise ZeroDivisionError
    else:
        with Trace(module) as trace:
            backward(trace, module(torch.randn(4, 8)).sum())
        assert len(trace.arrivals) > len(trace.calls)
    assert hooks() == before


def test_activation_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(nn.Identity())
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return checkpoint(self.net, x, use_reentrant=False)

    module = Checkpointed()
    with Trace(module) as trace:
        backward(trace, module(torch.randn(4, 8)).sum() * 1e36)
    assert [call.name for call in trace.calls] == ["net.0", "net.1", "net.2", "net.3", "net", ""]


def test_a_caught_exception_does_not_confuse_it() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    module = net(Tries())
    with Trace(module) as trace:
        module(torch.randn(4, 8))
    assert [call.name for call in trace.calls] == ["0", "1", "2.good", "2", "3", ""]


def test_gradients_in_half() -> None:
    module = net(nn.Identity())
    with Trace(module, values=False) as trace:
        with torch.autocast("cpu", torch.float16):
            loss = module(torch.randn(4, 8)).float().sum()
        backward(trace, loss)
    assert all(call.output_ends == [] for call in trace.calls)
    found = trace.gradients_in_half(trace.half_places)
    assert {arrival.place.parameter for arrival in found if arrival.place.parameter} == dict(
        module.named_parameters()
    ).keys()
    assert all(arrival.dtype is torch.float16 for arrival in found if arrival.place.where == "output")
    with Trace(module) as full:
        backward(full, module(torch.randn(4, 8)).sum())
    assert full.half_places == set()
    assert len(full.gradients_in_half(trace.half_places)) == len(found)


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_loss_scale_does_not_multiply_the_gradients_of_a_derivative(by_hand: bool) -> None:
    """Gradients of a backward count, also if the user's own code runs it."""
    module, x = net(), torch.randn(4, 8, requires_grad=True)
    with Trace(module) as trace:
        (gradient,) = torch.autograd.grad(1000 * module(x).sum(), x, create_graph=True)
        inner = list(trace.arrivals)
        loss = gradient.square().mean() * 1e-6
        loss.backward() if by_hand else backward(trace, loss)
    assert {arrival.is_inner for arrival in inner} == {True}
    counted = trace.gradients_in_half(set())
    assert counted == [arrival for arrival in trace.arrivals if arrival not in inner]
    assert {arrival.place.where for arrival in counted} == {"parameter", "output", "input"}
    assert max(float(arrival.largest) for arrival in counted) < 1 < max(float(arrival.largest) for arrival in inner)
