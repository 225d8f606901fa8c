"""Gradients of every kind are viewed as real, dense tensors. Writing into a view changes the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import flags_on_a_device
from torch import Tensor, nn

from lightning_amp.scaling import HalfGradientsError
from lightning_amp.scaling._gradients import Gradients, has_gradients, inverse

INF, NAN = float("inf"), float("nan")


def optimizer(device: torch.device, **grads: Any) -> torch.optim.Optimizer:
    """Return an optimizer with one parameter per gradient, of its shape and dtype; `None`: no gradient."""
    params: list[nn.Parameter] = []
    for grad in grads.values():
        value = torch.ones(2) if grad is None else torch.ones_like(grad.to_dense() if grad.is_sparse else grad)
        params.append(nn.Parameter(value.to(device)))
        params[-1].grad = None if grad is None else grad.to(device)
    return torch.optim.SGD(params, lr=0.1)


def grads(of: torch.optim.Optimizer) -> list[Any]:
    return [p.grad for group in of.param_groups for p in group["params"]]


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
    """Return gradients of every kind by name."""
    sparse_ones = pytest.param("sparse", marks=pytest.mark.needs("sparse"))
    return [sparse_ones if kind == "sparse" else kind for kind in every_kind() if kind not in without]


def flag(device: torch.device, value: float = 0.0) -> Tensor:
    return torch.tensor(value, device=device)


@pytest.mark.parametrize("kind", kinds())
def test_multiplying_the_views_multiplies_the_gradients(kind: str, device: torch.device) -> None:
    of = optimizer(device, grad=every_kind()[kind])
    expected = every_kind()[kind].to_dense() * 0.5
    Gradients(of).multiply_(flag(device, 0.5))
    (grad,) = grads(of)
    torch.testing.assert_close(grad.to_dense().cpu(), expected, check_device=False)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1.0])
@pytest.mark.parametrize("kind", kinds("empty"))
def test_a_value_that_is_not_finite_is_found(kind: str, value: float, device: torch.device) -> None:
    of = optimizer(device, first=torch.ones(2), bad=every_kind(value)[kind], last=None)
    expected = 0.0 if value == 1.0 else 1.0
    assert Gradients(of).check(flag(device)).item() == expected
    assert Gradients(of).unscale_(flag(device, 0.5), flag(device)).item() == expected


@pytest.mark.parametrize("method", ["check", "unscale_"])
def test_what_was_found_before_stays_found(method: str, device: torch.device) -> None:
    gradients = Gradients(optimizer(device, one=torch.ones(2)))
    arguments = [flag(device, 0.5)] if method == "unscale_" else []
    assert getattr(gradients, method)(*arguments, flag(device, 1.0)).item() == 1.0


def test_unscaling_divides_each_dtype(device: torch.device) -> None:
    of = optimizer(device, a=torch.tensor([8.0]), b=torch.tensor([8.0], dtype=torch.float64), c=None)
    assert Gradients(of).unscale_(flag(device, 0.25), flag(device)).item() == 0.0
    assert [g if g is None else g.item() for g in grads(of)] == [2.0, 2.0, None]


def test_a_gradient_that_cannot_be_written_into_is_checked(device: torch.device) -> None:
    """An expanded gradient is one number in memory. An optimizer only reads it."""
    for value, expected in ((1.0, 0.0), (NAN, 1.0)):
        expanded = torch.tensor([value], device=device).expand(4)
        of = optimizer(device, plain=torch.ones(4))
        next(iter(of.param_groups[0]["params"])).grad = expanded
        assert Gradients(of).check(flag(device)).item() == expected


@pytest.mark.needs("sparse")
def test_float16_duplicates_are_added_before_they_are_checked(device: torch.device) -> None:
    """Each entry is finite, but their sum, which the optimizer applies, is not."""
    of = optimizer(device, embedding=sparse(torch.float16, (6e4, 6e4)))
    assert Gradients(of).check(flag(device)).item() == 1.0


@pytest.mark.needs("sparse")
def test_plain_says_whether_a_fused_kernel_could_take_them(device: torch.device) -> None:
    kinds = {name: Gradients(optimizer(device, grad=grad)).plain for name, grad in every_kind().items()}
    assert {name for name, plain in kinds.items() if not plain} == {"complex", "conjugate", "sparse"}


@pytest.mark.needs("sparse")
@pytest.mark.parametrize("bad", [2.0, INF, NAN])
def test_the_largest_is_that_of_all(bad: float, device: torch.device) -> None:
    found = Gradients(optimizer(device, **every_kind(-bad))).largest()
    assert found is not None
    torch.testing.assert_close(found.cpu(), torch.tensor(max(bad, 3.0)), equal_nan=True)
    assert Gradients(optimizer(device, empty=torch.ones(0, 3), none=None)).largest() is None


def test_the_norm_is_that_of_all(device: torch.device) -> None:
    of = optimizer(device, a=torch.tensor([3.0]), b=torch.tensor([4.0], dtype=torch.float64), c=None)
    norm, found_inf = Gradients(of).true_norm(None)
    assert (norm.dtype, norm.item()) == (torch.float32, 5.0)
    assert found_inf is not None
    assert found_inf.item() == 0.0
    assert Gradients(of).true_norm(torch.tensor(2.0, device=device))[0].item() == 2.5


@pytest.mark.parametrize(
    ("value", "scale", "expected"),
    [
        (1e25, None, (INF, 0.0)),  # `clip_grad_norm_` finds inf as well, and sets gradients to 0
        (1e25, 2.0**20, (9.5367e18, 0.0)),
        (1e36, 2.0**-14, (INF, 1.0)),  # the true gradients are out of range
        (INF, None, (INF, 1.0)),
        (NAN, 2.0, (NAN, 1.0)),
    ],
)
def test_a_norm_that_overflows_says_nothing_about_the_gradients(
    value: float, scale: float | None, expected: tuple[float, float], device: torch.device
) -> None:
    of = optimizer(device, a=torch.tensor([value, 0.0]))
    with flags_on_a_device():
        found = Gradients(of).true_norm(None if scale is None else torch.tensor(scale, device=device))
    assert [x.item() for x in found if x is not None] == pytest.approx(expected, rel=1e-4, nan_ok=True)
    if device.type == "cpu" and (scale is None or expected[1]):
        assert Gradients(of).true_norm(None if scale is None else torch.tensor(scale))[1] is None


def test_what_is_left_out_is_left_alone(device: torch.device) -> None:
    of = optimizer(device, a=torch.tensor([1.0]), b=torch.tensor([NAN]))
    _, bad = of.param_groups[0]["params"]
    gradients = Gradients(of, {id(bad)})
    assert gradients.check(flag(device)).item() == 0.0
    assert not Gradients(of, set(map(id, of.param_groups[0]["params"])))


def test_half_gradients_are_refused_by_shape_and_dtype(device: torch.device) -> None:
    of = optimizer(device, a=torch.ones(2), b=torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(HalfGradientsError, match=r"shape \[3, 4\] is bfloat16") as caught:
        Gradients(of).require_full_precision(of)
    assert caught.value.parameter is of.param_groups[0]["params"][1]
    of.zero_grad()
    Gradients(of).require_full_precision(of)  # without gradients nothing is divided


def test_one_device_or_none(device: torch.device) -> None:
    both = optimizer(device, a=torch.ones(1), b=torch.ones(1, dtype=torch.float64))
    assert Gradients(both).device == grads(both)[0].device
    assert Gradients(optimizer(device, a=None)).device is None
    both.add_param_group({"params": [elsewhere := nn.Parameter(torch.ones(1, device="meta"))]})
    elsewhere.grad = torch.ones(1, device="meta")
    assert Gradients(both).device is None


def test_whether_there_are_any(device: torch.device) -> None:
    assert has_gradients(optimizer(device, a=None, b=torch.ones(1)))
    assert not has_gradients(optimizer(device, a=None))
    assert bool(Gradients(optimizer(device, a=None))) is False


def test_the_inverse_where_there_is_no_float64(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor(3.0, device=device)
    exact = inverse(scale)
    monkeypatch.setattr("lightning_amp.scaling._gradients.widest_dtype", lambda device: torch.float32)
    assert inverse(scale).dtype == exact.dtype == torch.float32
    assert inverse(scale).item() == pytest.approx(exact.item())
