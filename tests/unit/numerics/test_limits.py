from __future__ import annotations

import math

import pytest
import torch

from lightning_amp.numerics import FORMATS, fitting_scale, widest_dtype
from lightning_amp.numerics._limits import FormatLimits

KNOWN = {
    "fp16": (65504.0, 2.0**-24),
    "bf16": (3.3895313892515355e38, 2.0**-133),
    "fp32": (3.4028234663852886e38, 2.0**-149),
    "e4m3": (448.0, 2.0**-9),
    "e5m2": (57344.0, 2.0**-16),
}
"""The largest and the smallest value above zero."""


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_standards(name: str) -> None:
    fits = FORMATS[name]
    assert (fits.name, fits.largest, 2 * fits.rounds_to_zero) == (name, *KNOWN[name])


def converted(value: float, fits: FormatLimits) -> float:
    return float(torch.tensor(value, dtype=torch.float32).to(fits.dtype).float())


def beside(value: float, towards: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(towards)))


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp32"])
def test_thresholds_are_where_a_conversion_changes(name: str) -> None:
    fits, smallest_normal = FORMATS[name], torch.finfo(FORMATS[name].dtype).smallest_normal
    assert converted(fits.rounds_to_zero, fits) == 0
    assert converted(beside(fits.rounds_to_zero, 1.0), fits) == KNOWN[name][1]
    assert converted(fits.rounds_to_normal, fits) == smallest_normal
    assert converted(beside(fits.rounds_to_normal, 0.0), fits) < smallest_normal
    assert converted(beside(fits.overflows_from, 0.0), fits) == fits.largest
    if name == "e4m3":  # torch cuts, other libraries return NaN; without infinity there is nothing else
        assert not converted(fits.overflows_from, fits) < 448.0
        assert not converted(fits.overflows_from, fits) > 448.0
    else:
        assert converted(fits.overflows_from, fits) == math.inf


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
