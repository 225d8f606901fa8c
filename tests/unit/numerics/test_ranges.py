from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.numerics import (
    fidelity,
    fidelity_sums,
    fitting_scale,
    headroom_bits,
    largest,
    underflow_counts,
    widest_dtype,
)
from lightning_amp.numerics._limits import FP16_LARGEST, FP16_ROUNDS_TO_NORMAL, FP16_ROUNDS_TO_ZERO

INF, NAN = math.inf, math.nan
NOTHING = {"empty": torch.empty(0), "zeros": torch.zeros(3), "scalar zero": torch.zeros(())}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values)


def test_underflow_is_what_a_conversion_does() -> None:
    smallest_normal = torch.finfo(torch.float16).smallest_normal
    magnitude = torch.exp2(torch.empty(10_000).uniform_(-27.0, -11.0))
    values = magnitude * torch.where(torch.rand(10_000) < 0.5, -1.0, 1.0)
    converted = values.half().float().abs()
    zero, subnormal, counted = underflow_counts(values).tolist()
    assert zero == (converted == 0).sum()
    assert subnormal == ((converted > 0) & (converted < smallest_normal)).sum()
    assert counted == len(values)


def test_only_finite_values_other_than_zero_count() -> None:
    assert underflow_counts(tensor(0.0, 1e-9, 1e-6, 1.0, 1.0, INF, NAN, -0.0)).tolist() == [1, 1, 4]


def test_scale() -> None:
    scale = 2.0**10
    values = tensor(1e-9, 1e-6, 1.0, 100.0)
    assert underflow_counts(values, scale).tolist() == [0, 1, 4]
    assert headroom_bits(values, scale) == pytest.approx(math.log2(65504 / 102400), abs=1e-5)


@pytest.mark.parametrize("values", NOTHING.values(), ids=NOTHING)
def test_nothing_to_measure(values: Tensor) -> None:
    assert underflow_counts(values).tolist() == [0, 0, 0]
    assert headroom_bits(values) == INF
    assert largest(values) == 0


def test_headroom() -> None:
    assert headroom_bits(tensor(65504.0)) == pytest.approx(0, abs=1e-5)
    assert headroom_bits(tensor(-65504.0 / 8, 1.0)) == pytest.approx(3, abs=1e-5)
    assert headroom_bits(tensor(65504.0 * 4)) == pytest.approx(-2, abs=1e-5)
    assert headroom_bits(tensor(1.0, INF)) == -INF
    assert math.isnan(headroom_bits(tensor(1.0, NAN)))
    assert headroom_bits(tensor(2.0**-149)) == pytest.approx(165, abs=1e-3)


def test_largest() -> None:
    values = tensor(-3.0, 2.0, INF, NAN)
    assert math.isnan(largest(values))
    assert largest(values[:3]) == INF
    assert largest(torch.tensor([-2.0], dtype=torch.float16)).dtype is torch.float32


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        assert "_local_scalar_dense" not in str(func), "waited for the device"
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device() -> None:
    values, other = torch.randn(100), torch.randn(100)
    scale = 8.0
    with NoReads():
        underflow_counts(values, scale)
        headroom_bits(values, scale)
        largest(values)
        fidelity(fidelity_sums(values, other))
    with pytest.raises(AssertionError, match="waited"), NoReads():
        bool(values.sum() > 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "jagged"])
def test_tensors_that_are_not_plain(kind: str) -> None:
    """A sparse or nested tensor is measured by the values that it stores."""
    plain = torch.tensor([[0.0, -3.0], [torch.inf, 2.0]])
    layouts = {
        "sparse_coo": plain.to_sparse,
        "sparse_csr": plain.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([plain[0], plain[1]]),
        "jagged": lambda: torch.nested.nested_tensor([plain[0], plain[1]], layout=torch.jagged),
    }
    values = layouts[kind]()
    assert largest(values) == torch.inf


def converted(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).half().float())


def beside(value: float, towards: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(towards)))


def test_thresholds_of_fp16_are_where_a_conversion_changes() -> None:
    smallest_normal = torch.finfo(torch.float16).smallest_normal
    assert torch.finfo(torch.float16).max == FP16_LARGEST
    assert converted(FP16_ROUNDS_TO_ZERO) == 0
    assert converted(beside(FP16_ROUNDS_TO_ZERO, 1.0)) == 2.0**-24
    assert converted(FP16_ROUNDS_TO_NORMAL) == smallest_normal
    assert converted(beside(FP16_ROUNDS_TO_NORMAL, 0.0)) < smallest_normal


def test_fitting_scale() -> None:
    assert fitting_scale(65504.0, 0) == 1
    assert fitting_scale(65505.0, 0) == 0.5
    assert fitting_scale(1.0) == 2.0**13
    assert (fitting_scale(1e-30), fitting_scale(0.0), fitting_scale(1e30)) == (2.0**24, 2.0**24, 2.0**-14)


def test_what_a_device_computes_in_at_most(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_dtype(device) == torch.float64

    def fail(*args: object, **kwargs: object) -> None:
        raise TypeError("the MPS framework doesn't support float64")

    monkeypatch.setattr(torch, "ones", fail)
    assert widest_dtype(torch.device("mps", 7)) == torch.float32
