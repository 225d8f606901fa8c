"""Each reason for which a step is slow has its finding; a healthy one has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import machine, speed, step, timed

from lightning_amp.advice import (
    CastSite,
    Finding,
    Loading,
    OptimizerFacts,
    Reason,
    Step,
    Unaligned,
    Variant,
    Wait,
)
from lightning_amp.advice._decision import decide
from lightning_amp.advice._speed_rules import speed_findings

PARTS = step().parts
FORWARD = 3 * 10**8
GPU = machine(device_type="cuda")


def said(facts: Step, on: Any = None) -> list[Finding]:
    on = on or machine()
    return list(speed_findings(facts, on, decide(on, facts.precision, facts)))


def only(facts: Step, on: Any = None) -> Finding:
    found = said(facts, on)
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_step_has_no_finding() -> None:
    assert said(step()) == []


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait_s", "loading", "severity", "action"),
    [
        (0.1, Loading(0, 0.1, tried=((2, 0.05),)), "warning", "`num_workers=2, persistent_workers=True`"),
        (0.1, Loading(0, 0.1, tried=((2, 0.09),)), "warning", "do not help (tried here, per batch: 2: 90 ms)"),
        (0.1, Loading(0, 0.1), "warning", "Pass `num_workers=...`"),
        (0.1, Loading(4, 0.1, tried=((0, 0.02), (8, 0.05))), "warning", "Pass `num_workers=0` to"),
        (0.1, Loading(4, 0.1, tried=((0, 0.2), (8, 0.05))), "warning", "Pass `num_workers=8, persistent"),
        (0.1, Loading(2, 0.1, 0.09), "warning", "Pass `persistent_workers=True`"),
        (0.1, None, "warning", "Make the loader faster"),
        (0.015, Loading(0, 0.015, tried=((2, 0.01),)), "note", "`num_workers=2"),
        (
            0.1,
            Loading(0, 0.1, is_stream=True),
            "warning",
            "only if the `IterableDataset` gives each worker",
        ),
        (
            0.1,
            Loading(0, 0.1, tried=((2, 0.05),), is_stream=True),
            "warning",
            "`num_workers=2, persistent_workers=True`",
        ),
    ],
)
def test_a_step_that_waits_for_its_batch(wait_s: float, loading: Any, severity: str, action: str) -> None:
    found = only(step(parts={**PARTS, "data": wait_s}, loading=loading))
    assert (found.severity, found.code) == (severity, "data-bound")
    assert f"waits {wait_s * 1e3:.3g} ms" in found.message
    assert action in found.action


# -- fp32 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("autocast off", "autocast-off"),
        ("float64", "float64"),
        ("not on autocast's list", "not-on-autocast-list"),
        ("attention in fp32", "attention-in-fp32"),
    ],
)
def test_products_that_stay_in_fp32(why: str, code: str) -> None:
    where = 'net.py:7 "y = x @ w"'
    found = only(step(reasons=(Reason(why, where, FORWARD // 2), Reason(why, "", 1), Reason(why, "c", 1))))
    assert (found.severity, found.code) == ("warning", code)
    assert found.message.startswith("50 % of the FLOPs of the forward")
    assert f"{where}; the module itself, and in 1 other place." in found.message
    assert only(step(reasons=(Reason(why, where, FORWARD // 20),))).severity == "note"
    assert not said(step(reasons=(Reason(why, where, FORWARD // 100),)))


def test_fp32_modules_that_hold_most() -> None:
    facts = step(reasons=(Reason("fp32_modules", "net.head", FORWARD // 2),))
    found = only(facts)
    assert (found.severity, found.code) == ("warning", "fp32-modules-dominate")
    assert "`net.head`" in found.message
    assert "find_fp32_modules" in found.action
    tried = replace(facts, variants=(*facts.variants, timed("without fp32_modules", 0.05)))
    assert "without it, tried here: 2.00x as fast" in only(tried).message
    costs_nothing = replace(facts, variants=(*facts.variants, timed("without fp32_modules", 0.1)))
    assert only(costs_nothing).severity == "note"


# -- casts and sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "seconds", "count", "severity", "action"),
    [
        ("explicit", 0.03, 4, "warning", "Take the casts out"),
        ("explicit", 0.03, 1, "warning", "Take the casts out"),
        ("explicit", 0.003, 4, "note", "Take the casts out"),
        ("explicit", 0.0001, 30, "note", "Take the casts out"),
        ("weight again", 0.03, 30, "warning", "Call the module once"),
    ],
)
def test_casts_beyond_autocasts_own(kind: str, seconds: float, count: int, severity: str, action: str) -> None:
    found = only(step(casts=(CastSite(kind, "net.py:3", count, 3 * 2**20, seconds),)))
    assert (found.severity, found.code) == (severity, "many-casts")
    assert found.message.startswith(f"{count} ")
    assert "write 3 MiB" in found.message
    assert action in found.action


def test_autocasts_own_casts_are_none() -> None:
    own = tuple(CastSite(kind, "net", 100, 2**30, 0.05) for kind in ("weight", "activation"))
    assert not said(step(casts=own))


def unaligned(padded_seconds: float, flops: int = 10**9) -> tuple[Unaligned, ...]:
    found = speed(0.03 / padded_seconds)
    return (Unaligned((64, 33, 4001), (64, 40, 4008), "head", 3, flops, 0.03, padded_seconds, found),)


def test_sizes_that_are_no_multiples() -> None:
    found = only(step(unaligned=unaligned(0.01)))
    assert (found.severity, found.code) == ("warning", "sizes-not-aligned")
    assert "`head` (64 x 33 x 4001); padded, they save 20 % of a step" in found.message
    assert "(33 to 40, 4001 to 4008)" in found.action
    nothing = only(step(unaligned=unaligned(0.03)))
    assert (nothing.severity, nothing.action) == ("note", "Leave them as they are: padding gains nothing here.")
    assert "padded to 64 x 40 x 4008, measured here: as fast within 5 %" in nothing.message
    assert only(step(unaligned=unaligned(0.05))).severity == "note"
    unsure = tuple(replace(one, padded_speed=speed(2.0, noise=0.8)) for one in unaligned(0.01))
    assert (only(step(unaligned=unsure)).severity, "undecided" in only(step(unaligned=unsure)).message) == (
        "note",
        True,
    )
    much = step(unaligned=unaligned(0.001), product_s=0.01)
    assert "they save 10 % of a step" in only(much).message  # no more than its products take
    assert not said(step(unaligned=unaligned(0.01, 10**7)))


# -- optimizer and layout ----------------------------------------------------------------------------------------------


def test_an_optimizer_in_many_kernels() -> None:
    plain = (OptimizerFacts("Adam", False, True, 8.0, 1000),)
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
    fused = (OptimizerFacts("Adam", True, False, 8.0, 1000),)
    assert not said(replace(slow, optimizers=fused))


def test_channels_last_is_advised_only_where_it_gains() -> None:
    facts = step(convolutions=10**9)
    assert only(facts).severity == "note"
    tried = replace(facts, variants=(*facts.variants, timed("channels_last", 0.05)))
    assert (only(tried).severity, only(tried).code) == ("warning", "channels-last")
    assert "memory_format=torch.channels_last" in only(tried).action
    slower = replace(facts, variants=(*facts.variants, timed("channels_last", 0.3)))
    assert only(slower).severity == "note"
    assert only(slower).action.startswith("Leave it as it is")
    noisy = replace(facts, variants=(*facts.variants, Variant("channels_last", (0.05, 0.2, 0.05, 0.2, 0.05))))
    assert only(noisy).action.startswith("Undecided. Time channels_last by itself")
    assert not said(replace(tried, channels_last=True))


# -- the host ----------------------------------------------------------------------------------------------------------


def test_the_host_waits() -> None:
    facts = step(waits=(Wait("a.py:1", ".item()", 3), Wait("b.py:2", "nonzero", 1), Wait("log", "x", 9, by_user=False)))
    found = only(facts, GPU)
    assert (found.severity, found.code) == ("warning", "host-waits")
    assert "4 times in a step: .item() in a.py:1, and in 1 other place" in found.message
    on_cpu = only(facts)
    assert on_cpu.severity == "note"
    assert "On a CPU that is free" in on_cpu.message
    assert not said(step(waits=(Wait("log", "x", 9, by_user=False),)), GPU)


def test_a_slow_callback() -> None:
    found = only(step(parts={**PARTS, "callbacks": 0.1}, callbacks={"A": 0.001, "B": 0.099}))
    assert (found.severity, found.code) == ("warning", "slow-callback")
    assert "`B`: 99 ms" in found.message


def test_settings_that_cost_time() -> None:
    found = said(step(settings=("anomaly detection", "deterministic algorithms")))
    assert [(f.severity, f.code) for f in found] == [("warning", "anomaly-detection"), ("note", "deterministic")]


def test_a_gain_that_was_not_timed_is_not_advised() -> None:
    plain = (OptimizerFacts("Adam", False, True, 8.0, 1000),)
    found = only(step(optimizers=plain, parts={**PARTS, "optimizer": 0.1}))
    assert "`fused=True` was not timed" in found.message
    assert (found.severity, found.action.startswith("Undecided")) == ("note", True)
