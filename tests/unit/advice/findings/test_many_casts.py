"""Casts beyond autocast's own, by kind and place, and when they are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import LINE, cast, explicit_cast, only, said, step

from lightning_amp.advice._record import Operation
from lightning_amp.advice.findings._many_casts import cast_sites
from lightning_amp.measure import BACKWARD

LINEAR = "torch.nn.functional.linear"


def test_casts_by_kind() -> None:
    found = cast_sites(
        step(
            explicit_cast(),
            explicit_cast(),
            cast(cast_of=5, asked=LINEAR, place=LINE),
            cast(cast_of=5, asked=LINEAR),
            cast(cast_of=6),
            cast(cast_of=7, asked="torch.Tensor.to", place=LINE),  # autocast would have cast it here
            cast(part=BACKWARD, seconds=0.05),
        )
    )
    assert {(c.kind, c.where): (c.count, c.num_bytes) for c in found} == {
        ("explicit", "nowhere.py:7"): (2, 20),
        ("weight", "net"): (3, 30),
        ("weight again", "net"): (1, 10),
        ("activation", BACKWARD): (1, 10),
    }


def test_casts_of_many_places_are_summed_up() -> None:
    found = cast_sites(step(*(cast(module=f"m{i}", seconds=i) for i in range(20))))
    assert len(found) == 9
    assert sum(c.count for c in found) == 20
    assert found[-1].where == "12 other places"


def casts(kind: str, count: int, seconds: float) -> list[Operation]:
    own: dict[str, Any] = {"explicit": {"asked": "torch.Tensor.float", "place": LINE}, "again": {"cast_of": 5}}[kind]
    first = [] if kind == "explicit" else [cast(0.0, 0, cast_of=5, cast_bytes=1)]  # autocast's own
    return [*first, *(cast(seconds / count, 3 * 2**20 // count, **own) for _ in range(count))]


@pytest.mark.parametrize(
    ("kind", "seconds", "count", "severity", "action"),
    [
        ("explicit", 0.03, 4, "warning", "Take the casts out"),
        ("explicit", 0.03, 1, "warning", "Take the casts out"),
        ("explicit", 0.003, 4, "note", "Take the casts out"),
        ("explicit", 0.0001, 30, "note", "Take the casts out"),
        ("again", 0.03, 30, "warning", "Call the module once"),
    ],
)
def test_casts_beyond_autocasts_own(kind: str, seconds: float, count: int, severity: str, action: str) -> None:
    found = only(step(*casts(kind, count, seconds)))
    assert (found.severity, found.code) == (severity, "many-casts")
    assert found.message.startswith(f"{count} ")
    assert "write 3 MiB" in found.message
    assert action in found.action


def test_autocasts_own_casts_are_none() -> None:
    weights = [cast(0.0005, 2**20, cast_of=pointer) for pointer in range(1, 101)]
    assert not said(step(*weights, cast(part=BACKWARD, seconds=0.0)))


def test_one_slow_call_on_a_busy_machine_is_no_warning() -> None:
    """Of ten casts of the same size, the one in user code happened to take a hundred times as long."""
    usual = [cast(0.0001, 4096, cast_of=i + 1) for i in range(9)]
    (slow,) = casts("explicit", 1, 0.01)
    (found,) = (site for site in cast_sites(step(*usual, replace(slow, cast_bytes=4096))) if site.kind == "explicit")
    assert found.seconds == pytest.approx(0.0003)
