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
    inner_product,
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


# -- fidelity ----------------------------------------------------------------------------------------------------------


def sqnr_db(reference: Tensor, values: Tensor) -> Tensor:
    return fidelity(fidelity_sums(reference, values))[0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return fidelity(fidelity_sums(a, b))[1]


def test_known_ratios() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert sqnr_db(reference, reference + torch.tensor([0.0, 0.5])) == pytest.approx(20)
    assert sqnr_db(reference, reference * 1.1) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(reference, -reference) == pytest.approx(-6.0206, abs=1e-3)
    assert sqnr_db(reference, torch.zeros(2)) == 0


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, 74), (torch.bfloat16, 56)])
def test_rounding_has_the_known_noise(dtype: torch.dtype, expected: float) -> None:
    values = torch.randn(100_000)
    assert sqnr_db(values, values.to(dtype)) == pytest.approx(expected, abs=1.0)


def test_edges() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    for same in (zero, one, torch.empty(0), torch.tensor(2.0), one * 1e-38, one * 1e38):
        assert sqnr_db(same, same.clone()) == math.inf
        assert cosine(same, same) == pytest.approx(1)
    assert sqnr_db(zero, one) == -math.inf
    assert cosine(zero, one) == cosine(one, zero) == 0
    for bad in (math.inf, math.nan):
        other = torch.tensor([1.0, bad])
        for a, b in ((one, other), (other, one), (other, other)):
            assert math.isnan(sqnr_db(a, b))
            assert math.isnan(cosine(a, b))


def test_scale_does_not_matter() -> None:
    reference = torch.randn(1000)
    noisy = reference + 0.01 * torch.randn(1000)
    expected = float(sqnr_db(reference, noisy)), float(cosine(reference, noisy))
    for scale in (1e-30, 1e-9, 1e30):
        assert float(sqnr_db(reference * scale, noisy * scale)) == pytest.approx(expected[0], abs=1e-3)
        assert float(cosine(reference * scale, noisy * scale)) == pytest.approx(expected[1], abs=1e-6)


def test_cosine() -> None:
    a, b = torch.randn(1000), torch.randn(1000)
    assert float(cosine(a, b)) == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), abs=1e-5)
    assert cosine(a, -2 * a) == pytest.approx(-1)
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == pytest.approx(0, abs=1e-7)


def test_sums_add_up() -> None:
    a, b = torch.randn(2, 50)
    sums = fidelity_sums(a[:20], b[:20]) + fidelity_sums(a[20:], b[20:])
    whole = float(sqnr_db(a, b)), float(cosine(a, b))
    assert tuple(float(v) for v in fidelity(sums)) == pytest.approx(whole)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"The shapes must be the same; got \(2,\) and \(3,\)"):
        sqnr_db(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_values_have_two_parts(dtype: torch.dtype) -> None:
    reference = torch.tensor([3.0j, 4.0], dtype=dtype)
    for one in (reference, reference.conj(), reference.resolve_conj()):
        assert sqnr_db(one, one + 0.5j) == pytest.approx(10 * math.log10(25 / 0.5))
        assert cosine(one, one * 1j) == pytest.approx(0, abs=1e-6)
        assert inner_product(one, one) == pytest.approx(25)
    assert sqnr_db(reference, reference.conj()) == pytest.approx(10 * math.log10(25 / 36))
