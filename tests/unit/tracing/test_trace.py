"""The trace of a step, and where its first bad value began."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.toy import Quantized

from lightning_amp.tracing import Call, Gradient, Trace, described, first_bad, first_difference, fp32_throughout

Loss = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.loss = nn.Linear(8, 8), nn.Linear(8, 1), loss

    def step(self, batch: Tensor) -> Tensor:
        return self.loss(self, batch)


def traced(module: Net, batch: Tensor, *, fp32: bool = False, scale: float = 1.0, **options: Any) -> Trace:
    trace = Trace(module, __file__ + "?", **options)
    with fp32_throughout("cpu") if fp32 else nullcontext(), trace:
        with nullcontext() if fp32 else torch.autocast("cpu", dtype=torch.float16):
            loss = module.step(batch)
        trace.note_loss(loss)
        with trace.in_backward():
            (loss.float() * scale).backward()
    return trace.read()


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def named(found: Call | Gradient | None) -> tuple[str, str | None, str]:
    assert found is not None
    call = found.call if isinstance(found, Gradient) else found
    return call.key.name, call.module, type(found).__name__


def overflows(module: Any, x: Tensor) -> Tensor:
    return (module.head(module.body(x) * 1e6)).float().mean()


def swallowed(module: Any, x: Tensor) -> Tensor:
    """`softplus` of minus infinity is 0: the loss is finite, its gradient is not."""
    return F.softplus(-(module.body(x).square() * 1e6)).float().sum() + module.body(x).float().mean()


def masked(module: Any, x: Tensor) -> Tensor:
    scores = module.body(x).masked_fill(x > 0, -math.inf)
    return (torch.softmax(scores.float(), -1) * 1e6).half().float().sum()


def everything_masked(module: Any, x: Tensor) -> Tensor:
    scores = module.body(x) + torch.full((4, 8), -math.inf)
    return torch.softmax(scores.float(), -1).sum()


def divided_by_zero(module: Any, x: Tensor) -> Tensor:
    """Whole rows are infinite, which is no mask."""
    return torch.log_softmax(-module.body(x).float().abs() / 0.0, -1).sum()


def masked_by_a_logarithm(module: Any, x: Tensor) -> Tensor:
    return torch.softmax(module.body(x).float() + torch.zeros(4, 8).log(), -1).sum()


def contrastive(module: Any, x: Tensor) -> Tensor:
    """The sum overflows, the quotient by it is 0, and its logarithm is what the loss takes."""
    scores = (module.body(x).half() * 0 + 11.0).exp()
    return -(scores[:, 0] / scores.sum(1)).log().float().mean()


def steep(module: Any, x: Tensor) -> Tensor:
    return torch.sqrt(module.body(x).float().relu() * 0).sum()


def written(module: Any, x: Tensor) -> Tensor:
    out = module.body(x).clone()
    out.view(-1)[3:5] = math.nan
    return out.float().sum()


def repeated(module: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: torch.sqrt(module.body(y).float().relu() * 0), x, use_reentrant=False).sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (overflows, ("mul", "", "Call")),
        (everything_masked, ("softmax", "", "Call")),
        (masked_by_a_logarithm, ("softmax", "", "Call")),
        (divided_by_zero, ("div", "", "Call")),
        (steep, ("sqrt", "", "Gradient")),
        (written, ("assignment", "", "Call")),
        (repeated, ("sqrt", "", "Gradient")),
    ],
)
def test_the_first_bad_value_of_one_run(loss: Loss, expected: tuple[str, str, str]) -> None:
    assert named(first_bad(traced(Net(loss), batch()))) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (overflows, ("mul", "", "Call")),
        (masked, ("to", "", "Call")),  # the minus infinities of the mask are there in fp32, too
        (swallowed, ("mul", "", "Call")),
        (contrastive, ("sum", "", "Call")),
    ],
)
def test_the_first_difference_of_two_runs(loss: Loss, expected: tuple[str, str, str]) -> None:
    run, fp32_run = traced(Net(loss), batch()), traced(Net(loss), batch(), fp32=True)
    assert first_bad(fp32_run) is None
    assert named(first_difference(run, fp32_run)) == expected


def test_a_healthy_step_has_no_first_bad_value() -> None:
    module = Net(lambda m, x: m.head(m.body(x)).float().mean())
    run = traced(module, batch())
    assert first_bad(run) is None
    assert [call.key.name for call in run.calls if not call.in_backward] == ["linear", "linear", "float", "mean"]
    assert [call.module for call in run.calls][:2] == ["body", "head"]
    largest = module.body(batch()).detach().abs().max()
    assert run.calls[0].made.largest == pytest.approx(float(largest), rel=1e-2)
    assert run.calls[1].taken[0].maker is run.calls[0]


def test_an_overflow_of_the_scaled_backward() -> None:
    module = Net(lambda m, x: m.head(m.body(x)).float().mean())
    found = first_bad(traced(module, batch(), scale=2.0**30))
    assert isinstance(found, Gradient)
    assert found.dtype == torch.float16
    scale, run = 2.0**10, traced(module, batch(), scale=2.0**10)
    assert first_bad(run) is None
    assert run.largest_in_half() == scale  # of the bias, which adds up four values


def test_the_operation_is_described() -> None:
    module = Net(overflows)
    run, fp32_run = traced(module, batch()), traced(module, batch(), fp32=True)
    found = first_difference(run, fp32_run)
    assert found is not None
    op = described(found, run, fp32_run)
    assert (op.name, op.module, op.dtype, op.shape, op.result) == ("mul", "", "float16", (4, 8), "inf")
    assert op.file == __file__
    assert op.code == "return (module.head(module.body(x) * 1e6)).float().mean()"
    assert op.largest_in_fp32 == pytest.approx(float(module.body(batch()).detach().abs().max() * 1e6), rel=1e-2)
    assert not op.is_summed


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda x: torch.log(x * 0), "zero"),
        (lambda x: 1 / (x * 0), "zero"),
        (lambda x: torch.sqrt(-x.abs() - 1), "negative"),
        (lambda x: x[:0].mean(), "empty"),
        (lambda x: x[0, :1].std(), "one"),
        (lambda x: F.cross_entropy(x, torch.full((4,), -100)), "ignored"),
        (lambda x: torch.softmax(x - math.inf, -1), "masked"),
        (lambda x: (x * 0 + 6e4).half().sum(), "sum"),
        (lambda x: (x * 0 + 1e5).half(), "cast"),
        (lambda x: x.masked_fill(x > 0, math.inf), "literal"),
        (lambda x: torch.atanh(x * 0 + 1), "zero"),
        (lambda x: torch.logit(x * 0 + 2), "negative"),
    ],
)
@pytest.mark.filterwarnings("ignore:std\\(\\)")
def test_special_arguments(run: Callable[[Tensor], Tensor], kind: str) -> None:
    with torch.no_grad(), Trace(nn.Identity(), __file__ + "?") as trace:
        run(batch())
    assert [call.kind for call in trace.read().calls if call.made.bad][-1] == kind


def test_the_loss_in_fp32_has_no_half_precision_outside_of_modules() -> None:
    seen: list[torch.dtype] = []

    def loss(module: Any, x: Tensor) -> Tensor:
        out = module.body(x)
        cast = (out + 1e5).half()
        seen.extend((out.dtype, cast.dtype, (cast * 2).dtype))
        return cast.mean()

    run = traced(Net(loss), batch(), loss_in_fp32=True)
    assert seen == [torch.float16, torch.float32, torch.float32]
    assert first_bad(run) is None


def test_nothing_is_left_behind_and_nothing_changes() -> None:
    module, plain = Net(overflows), Net(overflows)
    traced(module, batch())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = plain.step(batch())
    loss.float().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_tensor_that_cannot_be_asked_is_passed_by() -> None:
    base = torch.ones(8).as_subclass(Quantized)
    run = traced(Net(lambda m, x: (m.body(x) * base).float().mean()), batch())
    assert first_bad(run) is None


def test_torch_func_and_batched_gradients() -> None:
    def loss(module: Any, x: Tensor) -> Tensor:
        squares = torch.func.vmap(lambda row: row.square().sum())(module.body(x).float())
        x = x.clone().requires_grad_()
        out = module.body(x).float()
        (jacobian,) = torch.autograd.grad(out, x, torch.eye(4)[:, :, None].expand(4, 4, 8), is_grads_batched=True)
        return squares.mean() + jacobian.mean()

    run = traced(Net(loss), batch())
    assert first_bad(run) is None
    assert any(one.is_inner for one in run.gradients)
