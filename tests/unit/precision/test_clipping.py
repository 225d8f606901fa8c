"""Plain gradients are clipped as by torch. Groups that torch takes one by one share one norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_amp.precision import _clipping


def parameters() -> list[nn.Parameter]:
    """Return parameters with gradients of many sizes; the last one has no gradient."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 5, 7, 2)]
    for i, param in enumerate(params[:-1]):
        param.grad = torch.randn(len(param), generator=generator) * 10.0**i
    return params


def grads(params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    return [param.grad for param in params]


CLIPPING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "norm": (_clipping.clip_by_norm, torch.nn.utils.clip_grad_norm_),
    "value": (_clipping.clip_by_value, torch.nn.utils.clip_grad_value_),
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Yield a mesh of one rank, in this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", CLIPPING)
def test_sharded_gradients_beside_plain_ones_are_clipped_as_if_nothing_was_sharded(how: str, mesh: Any) -> None:
    ours, theirs = CLIPPING[how]
    params, expected = parameters(), parameters()
    for i, placement in ((0, Shard(0)), (1, Partial())):  # the second is a sum that sequence parallelism has left
        grad, params[i] = params[i].grad, nn.Parameter(DTensor.from_local(params[i].detach(), mesh, [Replicate()]))
        params[i].grad = DTensor.from_local(grad, mesh, [placement])
    ours(params, 0.5)
    theirs(expected, 0.5)
    clipped = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads(params)]
    assert_same(clipped, grads(expected), rtol=1e-6, atol=0.0)
