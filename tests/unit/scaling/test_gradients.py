"""Gradients of every kind are divided by the scale, checked and clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.scaling import DynamicLossScaler, HalfGradientsError, OptimizerSteps, RecordLog, StepPlan

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


class Gives(torch.autograd.Function):
    """A loss with this gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return param.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return ctx.gradient * grad_output, None


class Loop:
    """An optimizer with these gradients, which carry the scale; without a scale they are assigned as they are."""

    def __init__(self, device: torch.device, *gradients: Tensor | None, scale: float | None = 8.0) -> None:
        def like(gradient: Tensor | None) -> nn.Parameter:
            value = torch.ones(2) if gradient is None else torch.ones_like(gradient.to_dense())
            return nn.Parameter(value.to(device))

        self.params = [like(gradient) for gradient in gradients]
        self.optimizer = torch.optim.SGD(self.params, lr=0.5)
        scaler = None if scale is None else DynamicLossScaler.static(scale)
        self.steps = OptimizerSteps(scaler, True, RecordLog(), [self.optimizer])
        found = [(p, g.to(device)) for p, g in zip(self.params, gradients, strict=True) if g is not None]
        if scale is None:
            for param, gradient in found:
                param.grad = gradient
            return
        scaled = self.steps.scale_loss(sum((Gives.apply(*pair) for pair in found), torch.zeros((), device=device)))
        with self.steps.scaled_backward():
            scaled.backward()

    def step(self) -> bool:
        """Return whether the step was skipped."""
        plan = StepPlan(in_closure=False)
        return self.steps.step(self.optimizer, lambda: None, lambda: None, plan)[1].skip.wait()


@pytest.mark.parametrize("kind", kinds("conjugate"))
def test_they_are_divided_by_the_scale(kind: str, device: torch.device) -> None:
    loop = Loop(device, every_kind()[kind], None)
    loop.steps.unscale_(loop.optimizer)
    expected = every_kind()[kind].to_dense()
    torch.testing.assert_close(loop.params[0].grad.to_dense().cpu(), expected, check_device=False)
    assert loop.params[1].grad is None


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("value", [INF, NAN, 1.0])
@pytest.mark.parametrize("kind", kinds("empty"))
def test_a_value_that_is_not_finite_is_found(kind: str, value: float, device: torch.device) -> None:
    loop = Loop(device, torch.ones(2), every_kind(value)[kind], None, scale=None)
    assert loop.step() is (value != 1.0)


@pytest.mark.needs("sparse")
def test_float16_duplicates_are_added_before_they_are_checked(device: torch.device) -> None:
    """Each entry is finite, but their sum, which the optimizer applies, is not."""
    assert Loop(device, sparse(torch.float16, (6e4, 6e4)), scale=None).step()


def test_half_gradients_are_refused_by_shape_and_dtype(device: torch.device) -> None:
    loop = Loop(device, torch.ones(2), torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(HalfGradientsError, match=r"shape \[3, 4\] is bfloat16"):
        loop.step()
