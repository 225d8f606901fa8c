"""One value says whether a step was skipped. Only `wait` waits for the device."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import CountReads, flags_on_a_device
from torch import Tensor

from lightning_amp.scaling import Skip

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def flag(value: float) -> Tensor:
    return torch.tensor(value)


def skips() -> dict[str, tuple[Skip, bool]]:
    """Return every form of a skip, with its true value."""
    return {
        "NO": (Skip.NO, False),
        "YES": (Skip.YES, True),
        "no, on a device": (Skip(flag(0.0)), False),
        "yes, on a device": (Skip(flag(1.0)), True),
    }


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_flag_in_host_memory_is_known_at_once_and_costs_nothing(value: float) -> None:
    with CountReads() as reads:
        skip = Skip.on_device(flag(value))
    assert skip is (Skip.YES if value else Skip.NO)
    assert reads.count == 0


@pytest.mark.parametrize("name", skips())
def test_only_wait_reads(name: str) -> None:
    skip, truth = skips()[name]
    with CountReads() as reads, flags_on_a_device():
        assert Skip.on_device(flag(1.0)).known is None
        assert Skip.if_nonfinite(flag(NAN)).known is None
        known = skip.known
        as_flag = skip.flag(CPU)
        both = [skip | other for other, _ in skips().values()]
        assert reads.count == 0
        assert skip.wait() is truth
        assert reads.count == (known is None)
    assert known in (None, truth)
    assert (as_flag.dtype, as_flag.shape, as_flag.item()) == (torch.float32, (), float(truth))
    assert [b.wait() for b in both] == [truth or other for _, other in skips().values()]


@pytest.mark.parametrize("pair", list(itertools.product(skips(), skips())), ids=" or ".join)
def test_or_is_known_wherever_it_can_be(pair: tuple[str, str]) -> None:
    (a, one), (b, other) = (skips()[name] for name in pair)
    both = a | b
    assert both.wait() is (one or other)
    if a.known is None and b.known is None:
        assert both.known is None
    elif None in (a.known, b.known):
        assert both.known is (True if Skip.YES in (a, b) else None)
    else:
        assert both is (Skip.YES if one or other else Skip.NO)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("value", [0.0, 3e38, INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_probe_asks_for_a_skip_if_it_is_not_finite(value: float, dtype: torch.dtype) -> None:
    probe = torch.tensor(value, dtype=dtype)
    assert Skip.if_nonfinite(probe).wait() is (not probe.isfinite().item())
