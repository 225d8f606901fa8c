"""The running line of the user's code is found."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_amp.tracing import Place, called_by_optimizer, running_place, user_place

HERE = Path(__file__).name


def test_libraries_are_not_the_user() -> None:
    seen: list[tuple[Place | None, bool]] = []
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: seen.append(running_place("nobody.py")))
    layer(torch.ones(1, 1))
    ((place, own),) = seen
    assert place is not None
    assert own
    assert place.file.endswith(HERE)


def test_the_search_ends_at_the_boundary() -> None:
    assert user_place(__file__) is None
    assert running_place(__file__) == (None, False)


def test_optimizers_are_told_apart() -> None:
    seen: list[bool] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(called_by_optimizer())
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1).as_subclass(Watched)
    seen.clear()
    torch.optim.SGD([parameter], lr=0.1, foreach=False).step()
    assert True in seen
    assert not called_by_optimizer()
