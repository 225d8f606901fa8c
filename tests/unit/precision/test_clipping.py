"""Plain gradients are clipped as by torch. Groups that torch takes one by one share one norm."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("limit", [0.5, 1e4])
@pytest.mark.parametrize("how", CLIPPING)
def test_plain_gradients_are_clipped_as_torch_does(how: str, limit: float) -> None:
    ours, theirs = CLIPPING[how]
    params = parameters()
    expected, before = parameters(), copy.deepcopy(grads(params))
    ours(iter(params), limit)  # an optimizer's parameters come as an iterator
    theirs(expected, limit)
    assert_same(grads(params), grads(expected))
    if limit == 1e4:
        assert_same(grads(params), before)
    else:
        with pytest.raises(AssertionError):
            assert_same(grads(params), before)


@pytest.mark.parametrize("how", CLIPPING)
def test_where_nothing_has_a_gradient_there_is_nothing_to_clip(how: str) -> None:
    params = parameters()[-1:]
    CLIPPING[how][0](params, 0.5)
    assert params[0].grad is None


@pytest.mark.parametrize("how", CLIPPING)
def test_groups_of_several_meshes_are_clipped_as_one(how: str) -> None:
    """Torch can stack norms and multiply gradients of one mesh only."""
    ours, theirs = CLIPPING[how]
    params, expected = parameters(), parameters()
    for param, mesh in zip(params, ("first", "second"), strict=False):
        param.grad.device_mesh = mesh  # type: ignore[union-attr]
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("clip_grads_with_norm_", "clip_grad_value_"):
            original = getattr(torch.nn.utils, name)

            def spy(group: Any, *args: Any, original: Any = original) -> None:
                calls.append(len(group))
                original(group, *args)

            patch.setattr(torch.nn.utils, name, spy)
        ours(params, 0.5)
    theirs(expected, 0.5)
    assert calls == [1, 1, 1]  # two meshes, and what is not sharded
    assert_same(grads(params), grads(expected), rtol=1e-6, atol=0.0)


def test_a_sharded_norm_is_gathered() -> None:
    """Each rank has a part of the norm, and would clip by another number."""

    class Norm:
        def full_tensor(self) -> Tensor:
            return torch.full((), 8.0)

    params = parameters()[:2]
    params[0].grad.device_mesh = "mesh"  # type: ignore[union-attr]
    before = copy.deepcopy(grads(params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "get_total_norm", lambda group: Norm())
        _clipping.clip_by_norm(params, 1.0)
    total = (2 * 8.0**2) ** 0.5
    assert_same(grads(params), [g / total for g in before if g is not None], rtol=1e-5, atol=0.0)


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
