"""Sharded gradients beside plain ones are clipped by one norm. (The promises clip plain ones.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from support import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_amp import AmpPrecision


def parameters() -> list[nn.Parameter]:
    """Return parameters with gradients of many sizes; the last one has no gradient."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 5, 7, 2)]
    for i, param in enumerate(params[:-1]):
        param.grad = torch.randn(len(param), generator=generator) * 10.0**i
    return params


def grads(params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    return [param.grad for param in params]


CLIPPING: dict[str, Callable[..., Any]] = {
    "norm": torch.nn.utils.clip_grad_norm_,
    "value": torch.nn.utils.clip_grad_value_,
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
    params, expected = parameters(), parameters()
    for i, placement in ((0, Shard(0)), (1, Partial())):  # the second is a sum that sequence parallelism has left
        grad, params[i] = params[i].grad, nn.Parameter(DTensor.from_local(params[i].detach(), mesh, [Replicate()]))
        params[i].grad = DTensor.from_local(grad, mesh, [placement])
    optimizer = torch.optim.SGD(params, lr=0.1)
    AmpPrecision("bf16").clip_gradients(optimizer, 0.5, GradClipAlgorithmType(how))
    CLIPPING[how](expected, 0.5)
    clipped = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads(params)]
    assert_same(clipped, grads(expected), rtol=1e-6, atol=0.0)
