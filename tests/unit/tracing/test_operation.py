"""Who is to blame, read from two runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lightning_amp.tracing import OperationWatch, blamed_in_fp32, blamed_in_half, fp32_throughout, operation


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


def test_of_infinities_that_were_written_what_made_a_nan_of_them_is_to_blame() -> None:
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
