from __future__ import annotations

import dataclasses

import pytest

from lightning_amp.scaling import StepRecord, Subscription


def test_records_are_immutable() -> None:
    record = StepRecord(0, 0, 1.0, 1.0, False, "none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.scale = 2.0  # type: ignore[misc]


def test_a_subscription_is_closed_once_and_for_all() -> None:
    everybody = list[Subscription]()
    one, two = (Subscription(lambda records: None, everybody) for _ in range(2))
    assert everybody == [one, two]
    one.close()
    one.close()
    assert (everybody, one.is_open, two.is_open) == ([two], False, True)
