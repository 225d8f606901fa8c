"""`optimizer-not-fused` and `channels-last`: advised only where they gained something here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.doctor_facts import FORWARD_FLOPS, convolution, only, said, step, timed

from lightning_amp.advice._record import OptimizerFacts, Variant

PARTS = step().parts


def test_an_optimizer_in_many_kernels() -> None:
    plain = (OptimizerFacts("Adam", True, 1000),)
    slow = step(optimizers=plain, parts={**PARTS, "optimizer": 0.1})
    tried = replace(slow, variants=(*slow.variants, timed("fused=True", 0.05)))
    found = only(tried)
    assert (found.severity, found.code) == ("warning", "optimizer-not-fused")
    assert "with `fused=True`, tried here: 2.00x as fast" in found.message
    assert "`torch.optim.Adam(..., fused=True)`" in found.action
    assert found.share == pytest.approx(0.5)
    useless = only(replace(slow, variants=(*slow.variants, timed("fused=True", 0.1))))
    assert (useless.severity, useless.action[:11]) == ("note", "Leave it as")
    assert not said(step(optimizers=plain))  # it takes no time
    fused = (OptimizerFacts("Adam", False, 1000),)
    assert not said(replace(slow, optimizers=fused))


def test_channels_last_is_advised_only_where_it_gains() -> None:
    facts = step(convolution(FORWARD_FLOPS))
    assert only(facts).severity == "note"
    tried = replace(facts, variants=(*facts.variants, timed("channels_last", 0.05)))
    assert (only(tried).severity, only(tried).code) == ("warning", "channels-last")
    assert "memory_format=torch.channels_last" in only(tried).action
    slower = replace(facts, variants=(*facts.variants, timed("channels_last", 0.3)))
    assert only(slower).severity == "note"
    assert only(slower).action.startswith("Leave it as it is")
    noisy = replace(facts, variants=(*facts.variants, Variant("channels_last", (0.05, 0.2, 0.05, 0.2, 0.05))))
    assert only(noisy).action.startswith("The race is undecided. Time `channels_last` by itself")
    assert not said(step(convolution(FORWARD_FLOPS, channels_last=True), variants=tried.variants))


def test_a_gain_that_was_not_timed_is_not_advised() -> None:
    plain = (OptimizerFacts("Adam", True, 1000),)
    found = only(step(optimizers=plain, parts={**PARTS, "optimizer": 0.1}))
    assert "`fused=True` was not timed" in found.message
    assert (found.severity, found.action.startswith("The race is undecided")) == ("note", True)
