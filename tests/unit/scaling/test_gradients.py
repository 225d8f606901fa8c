"""Gradients of every kind are divided by the scale, checked and clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import flags_on_a_device
from torch import Tensor, nn

from lightning_amp.scaling import DynamicLossScaler, HalfGradientsError, OptimizerSteps, RecordLog, Skip, StepPlan

INF, NAN = float("inf"), float("nan")


def sparse(dtype: torch.dtype = torch.float32, values: tuple[float, float] = (1.0, 2.0)) -> Tensor:
    """Return a sparse gradient with two entries for the same place."""
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor(values, dtype=dtype), (3,), check_invariants=True
    )


def every_kind(bad: float = 1.0) -> dict[str, Tensor]:
    return {
        "plain": torch.tensor([1.0, 2.0, bad]),
        "float64": torch.tensor([3.0, bad], dtype=torch.float64),
        "complex": torch.complex(torch.tensor([1.0]), torch.tensor([bad])),
        "conjugate": torch.complex(torch.tensor([1.0]), torch.tensor([bad])).conj(),
        "sparse": sparse(values=(1.0, bad)),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(bad),
    }


def kinds(*without: str) -> list[Any]:
    sparse_ones = pytest.param("sparse", marks=pytest.mark.needs("sparse"))
    return [sparse_ones if kind == "sparse" else kind for kind in every_kind() if kind not in without]


class Loop:
    """An optimizer whose gradients come from a scaled backward, and are these times the scale."""

    def __init__(self, device: torch.device, *gradients: Tensor | None, scale: float = 8.0, make: Any = None) -> None:
        def like(gradient: Tensor | None) -> nn.Parameter:
            value = torch.ones(2) if gradient is None else torch.ones_like(gradient.to_dense())
            return nn.Parameter(value.to(device))

        self.params = [like(gradient) for gradient in gradients]
        self.optimizer = (make or torch.optim.SGD)(self.params, lr=0.5)
        self.steps = OptimizerSteps(DynamicLossScaler.static(scale), True, RecordLog(), [self.optimizer])
        scaled = self.steps.scale_loss(sum((p.real.float().sum() for p in self.params), torch.zeros((), device=device)))
        with self.steps.scaled_backward():
            scaled.backward()
        for param, gradient in zip(self.params, gradients, strict=True):
            if gradient is not None:  # a product with a conjugated view would not be one
                value = gradient.to(device)
                param.grad = (value.conj() * scale).conj() if value.is_conj() else value * scale

    def step(self, **plan: Any) -> bool:
        """Return whether the step was skipped."""
        plan_ = StepPlan(in_closure=False, **plan)
        return self.steps.step(self.optimizer, lambda: None, lambda: None, plan_)[1].skip.wait()


@pytest.mark.parametrize("kind", kinds())
def test_they_are_divided_by_the_scale(kind: str, device: torch.device) -> None:
    loop = Loop(device, every_kind()[kind], None)
    loop.steps.unscale_(loop.optimizer)
    expected = every_kind()[kind].to_dense()
    torch.testing.assert_close(loop.params[0].grad.to_dense().cpu(), expected, check_device=False)
    assert loop.params[1].grad is None


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("kind", kinds("empty"))
def test_a_value_that_is_not_finite_is_found(kind: str, value: float, device: torch.device) -> None:
    assert Loop(device, torch.ones(2), every_kind(value)[kind], None).step()


def test_a_gradient_that_cannot_be_written_into_is_checked(device: torch.device) -> None:
    """An expanded gradient is one number in memory. An optimizer only reads it."""
    param = nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([param], lr=0.5)
    steps = OptimizerSteps(None, True, RecordLog(), [optimizer])
    for value, skipped in ((NAN, Skip.YES), (1.0, Skip.NO)):
        param.grad = torch.tensor([value], device=device).expand(4)
        assert steps.step(optimizer, lambda: None, lambda: None, StepPlan())[1].skip is skipped


@pytest.mark.needs("sparse")
def test_float16_duplicates_are_added_before_they_are_checked(device: torch.device) -> None:
    """Each entry is finite, but their sum, which the optimizer applies, is not."""
    param = nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))
    param.grad = sparse(torch.float16, (6e4, 6e4)).to(device)
    optimizer = torch.optim.SGD([param], lr=0.5)
    steps = OptimizerSteps(None, True, RecordLog(), [optimizer])
    assert steps.step(optimizer, lambda: None, lambda: None, StepPlan())[1].skip is Skip.YES


@pytest.mark.parametrize(
    ("value", "scale", "skipped"),
    [
        (1e25, 1.0, False),  # `clip_grad_norm_` finds inf as well, and sets gradients to 0
        (1e36, 2.0**-14, True),  # the true gradients are out of range
        (INF, 1.0, True),
        (NAN, 2.0, True),
    ],
)
def test_a_norm_that_overflows_says_nothing_about_the_gradients(
    value: float, scale: float, skipped: bool, device: torch.device
) -> None:
    with flags_on_a_device():
        loop = Loop(device, torch.ones(2), scale=scale, make=lambda p, lr: torch.optim.AdamW(p, lr, fused=True))
        loop.params[0].grad = torch.tensor([value, 0.0], device=device)
        assert loop.step(fold=True, max_norm=1.0) is skipped
    assert loop.params[0].isfinite().all()


def test_half_gradients_are_refused_by_shape_and_dtype(device: torch.device) -> None:
    loop = Loop(device, torch.ones(2), torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(HalfGradientsError, match=r"shape \[3, 4\] is bfloat16") as caught:
        loop.step()
    assert caught.value.parameter is loop.params[1]
