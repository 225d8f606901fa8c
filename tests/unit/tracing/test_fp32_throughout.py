"""Inside, code that casts to half precision by hand computes in float32, also in its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.tracing import Fp32Draws, fp32_throughout

LARGE = 1e5
"""Overflows in float16."""

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float16),
    "to another": lambda x: x.to(torch.ones(1, dtype=torch.float16)),
    "to with a device": lambda x: x.to("cpu", torch.bfloat16, copy=True),
    "type": lambda x: x.type(torch.float16),
    "type as": lambda x: x.type_as(torch.ones(1).half()),
    "softmax": lambda x: x * torch.softmax(torch.zeros_like(x), -1, dtype=torch.float16) * 2,
    "sum": lambda x: x + torch.zeros_like(x).sum(dtype=torch.bfloat16),
    "new tensor": lambda x: x * torch.ones(2, dtype=torch.float16),
    "half-precision buffer": lambda x: x * HALF,
    "autocast": lambda x: torch.autocast("cpu", torch.float16)(torch.mv)(torch.eye(2), x),
}
HALF = torch.ones(2, dtype=torch.float16)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_cast_leaves_the_values_as_they_are(cast: str, mode: Any) -> None:
    with mode(), fp32_throughout("cpu"):
        x = torch.full((2,), LARGE + 1, requires_grad=mode is torch.enable_grad)
        result = CASTS[cast](x)
        assert result.dtype == torch.float32
        assert result.tolist() == [LARGE + 1] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_a_cast_inside_torchscript_leaves_the_values_as_they_are() -> None:
    traced: Any = torch.jit.trace(lambda x: x.to(torch.float16) * 1, torch.ones(2))
    with fp32_throughout("cpu"):
        assert traced(torch.full((2,), LARGE + 1)).tolist() == [LARGE + 1] * 2


def test_outside_nothing_changes() -> None:
    with fp32_throughout("cpu"):
        pass
    assert torch.ones(1).half().dtype == torch.float16


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("cast", ["half", "to", "type"])
def test_an_edit_of_the_cast_does_not_change_the_original(mode: Any, cast: str) -> None:
    with mode(), fp32_throughout("cpu"):
        x = torch.ones(2)
        CASTS[cast](x).add_(1)
        assert x.tolist() == [1, 1]


def test_writes_into_a_half_precision_tensor_arrive() -> None:
    cache = torch.zeros(2, 2, dtype=torch.bfloat16)
    with fp32_throughout("cpu"):
        cache[:, 0] = torch.ones(2).bfloat16()
        cache[:, 1].add_(2.0)
        torch.add(torch.ones(2), 2.0, out=cache[1])
    assert cache.tolist() == [[1, 2], [3, 3]]


def test_tensors_from_other_ranks_arrive() -> None:
    received, sent = torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with fp32_throughout("cpu"):
            dist.all_gather([received], sent)
    finally:
        dist.destroy_process_group()
    assert received.item() == 1


def test_bits_are_read_as_they_are() -> None:
    with fp32_throughout("cpu"):
        assert torch.tensor([1], dtype=torch.int16).view(torch.bfloat16).view(torch.int16).tolist() == [1]


def test_random_numbers_are_drawn_in_the_dtype_that_the_code_asks_for() -> None:
    def draw() -> Tensor:
        torch.manual_seed(0)
        return torch.randn(100, dtype=torch.bfloat16).float()

    expected = draw()
    with fp32_throughout("cpu"):
        assert torch.equal(draw(), expected)


class Body(nn.Module):
    """A frozen half-precision layer behind a cast by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).float()


@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_the_backward_is_in_fp32_too(checkpointed: bool | None) -> None:
    torch.manual_seed(0)
    body, x = Body(), torch.randn(3, 4)
    exact = nn.Linear(4, 4)
    exact.load_state_dict(body.layer.state_dict())

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        function(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def run(leaf: Tensor) -> Tensor:
        return body(leaf) if checkpointed is None else checkpoint(body, leaf, use_reentrant=checkpointed)

    assert not torch.equal(gradient(run), gradient(exact))
    with fp32_throughout("cpu"):
        assert torch.equal(gradient(run), gradient(exact))


def test_an_outer_autocast_is_off() -> None:
    with torch.autocast("cpu", torch.bfloat16), fp32_throughout("cpu"):
        assert (torch.eye(2) @ torch.eye(2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "dropout": lambda x: nn.functional.dropout(x + 1, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_like_a_half_precision_tensor_are_those_of_float32(draw: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact, after = DRAWS[draw](torch.zeros(1000)), torch.rand(1)
    torch.manual_seed(0)
    x = torch.zeros(1000, dtype=dtype)
    with Fp32Draws():
        drawn = DRAWS[draw](x)
    assert torch.equal(drawn, exact.to(dtype))
    assert torch.equal(torch.rand(1), after)
    assert (drawn is x) == (draw in ("normal_", "uniform_"))


def test_a_dtype_that_the_code_names_is_drawn_as_it_is() -> None:
    def draw(**kwargs: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.randn_like(torch.zeros(100, dtype=torch.bfloat16), **kwargs).float()

    expected = draw(dtype=torch.bfloat16)
    with Fp32Draws():
        assert torch.equal(draw(dtype=torch.bfloat16), expected)
        assert not torch.equal(draw(), expected)
