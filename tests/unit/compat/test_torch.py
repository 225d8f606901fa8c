"""Private names of torch still do what we need of them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_amp._compat import _torch


def test_a_cast_into_memory_that_is_given() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    other = torch.tensor([3.0, 5.0], dtype=torch.bfloat16)
    cast = _torch.cast_to(parameter, other)
    assert cast.dtype == torch.bfloat16
    loss = (cast * cast).sum()
    with torch.no_grad():
        parameter.add_(1)  # an optimizer step between forward and backward
    loss.backward()
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [6.0, 10.0]


def test_state_of_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert _torch.scale_tensor(scaler) == 8
    _torch.set_scale_tensor(scaler, torch.tensor(4.0), torch.tensor(3, dtype=torch.int32))
    assert (scaler.get_scale(), int(_torch.growth_tracker(scaler))) == (4.0, 3)
    assert scaler.state_dict()[_torch.GROWTH_TRACKER] == 3
    assert _torch.take_found_infs(scaler) == []
    _torch.reset_scale(scaler, 16.0, tracker=2)
    assert (float(_torch.scale_tensor(scaler)), int(_torch.growth_tracker(scaler))) == (16.0, 2)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_is_told(make: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not _torch.decides_on_device(make([parameter]))  # type: ignore[call-arg]
    optimizer = make([parameter], fused=True)  # type: ignore[call-arg]
    if make is torch.optim.Adagrad and not hasattr(optimizer, "_step_supports_amp_scaling"):
        assert not _torch.decides_on_device(optimizer)
        pytest.skip("up to torch 2.8 a fused Adagrad cannot be told")
    assert _torch.decides_on_device(optimizer)
    parameter.grad = torch.ones(2)
    _torch.set_found_inf(optimizer, torch.tensor(1.0))
    _torch.set_grad_scale(optimizer, torch.tensor(2.0))
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0]
    _torch.clear_amp_attributes(optimizer)
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    optimizer.step()
    assert parameter.tolist() != [1.0, 1.0]
    optimizer.load_state_dict(make([parameter]).state_dict())  # type: ignore[call-arg]
    assert not _torch.is_fused(optimizer)


def test_hooks_around_a_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])

    def hook(*args: object) -> None:
        return None

    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        assert not _torch.has_step_hooks(optimizer)
        handle = register(hook)
        assert _torch.has_step_hooks(optimizer)
        handle.remove()
    handle = register_optimizer_step_pre_hook(hook)
    assert _torch.has_step_hooks(optimizer)
    hook.only_looks = True  # type: ignore[attr-defined]
    assert not _torch.has_step_hooks(optimizer)
    handle.remove()


def test_the_optimizer_of_the_user() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    assert _torch.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert _torch.unwrap_optimizer(optimizer) is optimizer
