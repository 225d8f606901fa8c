"""Facts of a step."""

from __future__ import annotations

from support.doctor_facts import step, timed

from lightning_amp.advice import Variant


def test_a_variant_that_was_not_timed_is_none() -> None:
    found = step(variants=(timed("a", 1.0), Variant("b", (), "out of memory")))
    assert found.variant("a") is not None
    assert found.variant("b") is None
    assert found.variant("c") is None
