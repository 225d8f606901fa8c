from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_amp.numerics import fidelity, fidelity_sums, inner_product


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
