from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.numerics import (
    all_finite,
    extremes,
    names_of_nonfinite,
    nonfinite,
    nonfinite_flag,
    nonfinite_gradients,
)

BAD = [math.inf, -math.inf, math.nan]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars(dtype: torch.dtype) -> None:
    for value in (0.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal):
        assert not nonfinite(torch.tensor(value, dtype=dtype))
        assert nonfinite_flag(torch.tensor(value, dtype=dtype)) == 0.0
    for value in BAD:
        assert nonfinite(torch.tensor(value, dtype=dtype))
        flag = nonfinite_flag(torch.tensor(value, dtype=dtype))
        assert (flag, flag.dtype, flag.shape) == (1.0, torch.float32, ())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_value_among_many(dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(7).to(dtype)
    assert all_finite([values])
    values[4] = torch.tensor(bad).to(dtype)
    assert not all_finite([torch.ones(3), values, torch.ones(3)])
    assert not all_finite([values[4]])


def test_imaginary_part_counts() -> None:
    assert not all_finite([torch.complex(torch.ones(2), torch.tensor([0.0, math.inf])).conj()])


def test_large_values_are_finite() -> None:
    """Their sum overflows, and so does the magnitude of a complex number with such parts."""
    assert all_finite([torch.full((10,), torch.finfo(torch.float32).max)])
    assert all_finite([torch.full((10,), torch.finfo(torch.float64).max, dtype=torch.float64), torch.ones(1)])
    assert all_finite([torch.complex(torch.full((1,), 3e38), torch.full((1,), 3e38))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_dtypes_under_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        assert all_finite([torch.ones(2, dtype=d) for d in DTYPES])
        assert not all_finite([torch.full((2,), math.inf if d == dtype else 1.0, dtype=d) for d in DTYPES])


def test_nothing_is_finite() -> None:
    for tensors in ([], [torch.empty(0)], [torch.tensor([1, 2]), torch.tensor([True])]):
        answer = all_finite(tensors)
        assert (bool(answer), answer.dtype, answer.shape) == (True, torch.bool, ())


def test_sparse_values() -> None:
    assert all_finite([torch.eye(3).to_sparse()])
    assert not all_finite([torch.diag(torch.tensor([1.0, math.nan])).to_sparse()])


def test_names_of_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert nonfinite_gradients(dict(net.named_parameters())) == ()
    net[0].weight.grad = torch.ones(2, 2)
    net[1].bias.grad = torch.tensor([0.0, math.inf])
    net[1].weight.grad = torch.full((2, 2), math.nan)
    assert nonfinite_gradients(dict(net.named_parameters())) == ("1.weight", "1.bias")
    odd = [("meta", torch.ones(2, device="meta")), ("lazy", nn.UninitializedParameter())]
    assert names_of_nonfinite([*odd, ("_orig_mod.b", torch.tensor(math.nan))]) == ("b",)


def test_extremes() -> None:
    low, high = extremes(torch.tensor([[3.0, -math.inf], [1.0, 2.0]], requires_grad=True))
    assert (float(low), float(high), low.requires_grad) == (-math.inf, 3, False)
    assert all(end.isnan() for end in extremes(torch.tensor([1.0, math.nan, math.inf], dtype=torch.float16)))
    assert [float(end) for end in extremes(torch.complex(torch.tensor([1.0]), torch.tensor([-2.0])))] == [-2, 1]
    assert extremes(torch.empty(0)) == extremes(torch.tensor([1, 2])) == ()


def test_modes_do_not_see_what_is_measured() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    values = torch.tensor([1.0, math.inf])
    with Mode():
        assert len(extremes(values)) == 2
    assert seen == []
