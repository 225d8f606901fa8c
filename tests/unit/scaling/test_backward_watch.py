"""`BackwardWatch` tells gradients of a scaled backward from gradients of the user's own backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.scaling import BackwardWatch

SCALE = torch.tensor(1024.0)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def sgd(*params: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def scaled(watch: BackwardWatch, loss: Tensor) -> None:
    watch.begin(SCALE)
    (loss * SCALE).backward()
    watch.end()


def scaled_by_hand(watch: BackwardWatch, loss: Tensor) -> None:
    of_it = loss * SCALE
    of_it.register_hook(lambda _: watch.begin_by_hand(SCALE))
    of_it.backward()


def num_hooks(*params: nn.Parameter) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in params)


def test_a_known_optimizer_came_plain_after_a_backward_of_the_users_own() -> None:
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([optimizer], [])
    assert not watch.came_plain(optimizer)  # there are no gradients yet
    scaled(watch, p.sum())
    assert not watch.came_plain(optimizer)
    p.sum().backward()
    assert watch.came_plain(optimizer)
    scaled(watch, p.sum())
    assert not watch.came_plain(optimizer)
    p.sum().backward()
    optimizer.zero_grad()
    assert not watch.came_plain(optimizer)


def test_gradients_that_no_backward_made_came_with_the_scale() -> None:
    """Gradients that the user writes by hand count as gradients of the plugin's backward."""
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([optimizer], [])
    p.grad = torch.ones(2)
    assert not watch.came_plain(optimizer)


def test_one_hook_speaks_for_a_known_optimizer() -> None:
    frozen, first, second = parameter().requires_grad_(False), parameter(), parameter()
    watch = BackwardWatch([sgd(frozen, first, second)], [frozen, first, second, other := parameter()])
    assert [num_hooks(p) for p in (frozen, first, second, other)] == [0, 1, 0, 1]
    watch.detach()
    assert num_hooks(frozen, first, second, other) == 0


def test_an_optimizer_that_is_not_known_has_the_scale_of_its_backward() -> None:
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([], [p])
    scaled(watch, p.sum())
    assert watch.scale_of(optimizer, {}) is SCALE
    optimizer.zero_grad()
    assert watch.scale_of(optimizer, {}) is None
    p.sum().backward()
    assert watch.scale_of(optimizer, {}) is None


def test_inside_of_a_backward_everything_has_its_scale() -> None:
    """Parameters that are not watched have the scale too, since some users step in a hook on the gradient."""
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([], [])
    seen: list[Tensor | None] = []
    p.register_post_accumulate_grad_hook(lambda _: seen.append(watch.scale_of(optimizer, {})))
    scaled(watch, p.sum())
    assert seen == [SCALE]


def test_a_shared_parameter_has_the_scale_that_its_known_optimizer_has() -> None:
    optimizer = sgd(alone := parameter(), shared := parameter())
    watch = BackwardWatch([sgd(shared)], [])
    scaled(watch, shared.sum())
    carried = torch.tensor(512.0)  # the gradient was carried since its backward
    assert watch.scale_of(optimizer, {id(shared): carried}) is carried
    assert watch.scale_of(sgd(alone), {id(shared): carried}) is None


def test_a_parameter_that_nobody_watched_is_watched_from_then_on() -> None:
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([], [])
    scaled(watch, p.sum())
    assert watch.scale_of(optimizer, {}) is None  # too late for this backward
    scaled(watch, p.sum())
    assert watch.scale_of(optimizer, {}) is SCALE
    watch.detach()
    assert num_hooks(p) == 0
    assert watch.scale_of(sgd(p), {}) is None


def test_a_backward_that_the_user_scales_ends_by_itself() -> None:
    known, other = sgd(p := parameter()), sgd(q := parameter())
    watch = BackwardWatch([known], [q])
    during: list[Tensor | None] = []
    p.register_post_accumulate_grad_hook(lambda _: during.append(watch.scale))
    scaled_by_hand(watch, p.sum() + q.sum())
    assert during == [SCALE]
    assert watch.scale is None
    assert not watch.plugins_runs
    assert not watch.came_plain(known)
    assert watch.scale_of(other, {}) is SCALE
    (p.sum() + q.sum()).backward()
    assert during == [SCALE, None]
    assert watch.came_plain(known)
    assert watch.scale_of(other, {}) is None


def test_one_that_fails_leaves_nothing_behind() -> None:
    known = sgd(p := parameter())
    watch = BackwardWatch([known], [])
    loss = p * 2
    loss.register_hook(fails)
    with pytest.raises(KeyError, match="half-way"):
        scaled_by_hand(watch, loss.sum())
    assert watch.scale is None
    p.sum().backward()
    assert watch.came_plain(known)


def fails(_: Tensor) -> None:
    raise KeyError("half-way")


def assign_derivative(of: nn.Parameter, factor: float = 3.0) -> None:
    (of.grad,) = torch.autograd.grad((of * factor).sum(), of)


def test_a_derivative_that_is_assigned_after_a_scaled_backward_is_plain() -> None:
    """An inner loop's optimizer may share parameters with the outer optimizer, whose first parameter is watched."""
    outer = sgd(first := parameter(), second := parameter())
    watch = BackwardWatch([outer], [])
    inner = sgd(first, second)
    scaled(watch, first.sum() + second.sum())
    known = {id(p): SCALE for p in (first, second)}
    assert watch.scale_of(inner, known) is SCALE
    assign_derivative(first)
    assign_derivative(second)
    assert [watch.scale_of(inner, known) for _ in range(2)] == [None, None]
    assert watch.scale_of(inner, {}) is None
    outer.zero_grad()
    scaled(watch, first.sum() + second.sum())
    assert watch.scale_of(inner, known) is SCALE
    watch.detach()
    assert not any(p._backward_hooks for p in (first, second))


def test_a_scaled_gradient_that_is_assigned_stays_scaled() -> None:
    optimizer, other = sgd(p := parameter()), parameter()
    watch = BackwardWatch([], [p])
    scaled(watch, p.sum())
    p.grad = None if p.grad is None else p.grad.clone()
    assert watch.scale_of(optimizer, {}) is SCALE
    scaled(watch, other.sum())
    p.grad = other.grad
    assert watch.scale_of(optimizer, {id(p): SCALE}) is SCALE


def test_a_derivative_that_nobody_assigns_leaves_the_gradient_scaled() -> None:
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([], [p])
    scaled(watch, p.sum())
    torch.autograd.grad(p.sum(), p)  # a derivative of another loss
    assert watch.scale_of(optimizer, {}) is SCALE


def test_a_scaled_derivative_that_is_assigned_is_scaled() -> None:
    optimizer = sgd(p := parameter())
    watch = BackwardWatch([], [p])
    scaled(watch, p.sum())
    watch.begin(SCALE)
    assign_derivative(p)
    watch.end()
    assert watch.scale_of(optimizer, {}) is SCALE
