"""Each reason for which a step is slow has its finding; a healthy one has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import machine, step, timed

from lightning_amp.advice import (
    CastSite,
    Finding,
    Format,
    Loading,
    OptimizerFacts,
    Reason,
    SlowProduct,
    Step,
    Unaligned,
    Variant,
    Wait,
)
from lightning_amp.advice._speed_rules import speed_findings

PARTS = step().parts
FORWARD = 3 * 10**8
GPU = machine(device_type="cuda")


def only(facts: Step, on: Any = None) -> Finding:
    found = list(speed_findings(facts, on or machine()))
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_step_has_no_finding() -> None:
    assert list(speed_findings(step(), machine())) == []


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
    assert not list(speed_findings(step(reasons=(Reason(why, where, FORWARD // 100),)), machine()))


def test_fp32_modules_that_hold_most() -> None:
    facts = step(reasons=(Reason("fp32_modules", "net.head", FORWARD // 2),))
    found = only(facts)
    assert (found.severity, found.code) == ("warning", "fp32-modules-dominate")
    assert "`net.head`" in found.message
    assert "find_fp32_modules" in found.action
    tried = replace(facts, variants=(*facts.variants, timed("without fp32_modules", 0.05)))
    assert "without it a step is 2 times as fast" in only(tried).message
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
    assert not list(speed_findings(step(casts=own), machine()))


def unaligned(padded_seconds: float, flops: int = 10**9) -> tuple[Unaligned, ...]:
    return (Unaligned((64, 33, 4001), (64, 40, 4008), "head", 3, flops, 0.03, padded_seconds),)


def test_sizes_that_are_no_multiples() -> None:
    found = only(step(unaligned=unaligned(0.01)))
    assert (found.severity, found.code) == ("warning", "sizes-not-aligned")
    assert "`head` (64 x 33 x 4001); padded to 64 x 40 x 4008 they would save 20 % of a step" in found.message
    assert "(33 to 40, 4001 to 4008)" in found.action
    assert only(step(unaligned=unaligned(0.029))).severity == "note"  # it was measured, and gains nothing
    assert only(step(unaligned=unaligned(0.05))).severity == "note"
    assert not list(speed_findings(step(unaligned=unaligned(0.01, 10**7)), machine()))


# -- optimizer and layout ----------------------------------------------------------------------------------------------


def test_an_optimizer_in_many_kernels() -> None:
    plain = (OptimizerFacts("Adam", False, True, 8.0, 1000),)
    slow = step(optimizers=plain, parts={**PARTS, "optimizer": 0.1})
    tried = replace(slow, variants=(*slow.variants, timed("fused=True", 0.05)))
    found = only(tried)
    assert (found.severity, found.code) == ("warning", "optimizer-not-fused")
    assert "2 times as fast" in found.message
    assert "`torch.optim.Adam(..., fused=True)`" in found.action
    assert found.share == 0.5
    useless = only(replace(slow, variants=(*slow.variants, timed("fused=True", 0.1))))
    assert (useless.severity, useless.action[:11]) == ("note", "Leave it as")
    assert not list(speed_findings(step(optimizers=plain), machine()))  # it takes no time
    fused = (OptimizerFacts("Adam", True, False, 8.0, 1000),)
    assert not list(speed_findings(replace(slow, optimizers=fused), machine()))


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
    assert only(noisy).action.startswith("Undecided: the figures are too noisy")
    assert not list(speed_findings(replace(tried, channels_last=True), machine()))


# -- the host ----------------------------------------------------------------------------------------------------------


def test_the_host_waits() -> None:
    facts = step(waits=(Wait("a.py:1", ".item()", 3), Wait("b.py:2", "nonzero", 1), Wait("log", "x", 9, by_user=False)))
    found = only(facts, GPU)
    assert (found.severity, found.code) == ("warning", "host-waits")
    assert "4 times in a step: .item() in a.py:1, and in 1 other place" in found.message
    on_cpu = only(facts)
    assert on_cpu.severity == "note"
    assert "On a CPU that is free" in on_cpu.message
    assert not list(speed_findings(step(waits=(Wait("log", "x", 9, by_user=False),)), GPU))


def test_a_slow_callback() -> None:
    found = only(step(parts={**PARTS, "callbacks": 0.1}, callbacks={"A": 0.001, "B": 0.099}))
    assert (found.severity, found.code) == ("warning", "slow-callback")
    assert "`B`: 99 ms" in found.message


def test_settings_that_cost_time() -> None:
    found = list(speed_findings(step(settings=("anomaly detection", "deterministic algorithms")), machine()))
    assert [(f.severity, f.code) for f in found] == [("warning", "anomaly-detection"), ("note", "deterministic")]


# -- nothing to gain ---------------------------------------------------------------------------------------------------


def small(**changes: Any) -> Step:
    variants = (timed("as it is", 0.1), timed("fp32", 0.1))
    return step(**{"fp32_product_share": 0.1, "variants": variants, **changes})


def test_a_model_that_is_too_small() -> None:
    found = only(small())
    assert (found.severity, found.code) == ("warning", "model-too-small")
    assert "10 % of a step in fp32, so that at best 1.08 times the speed" in found.message
    assert found.action.startswith('Stay in "fp32"')
    larger = small(variants=(*small().variants, timed("4 times the batch", 0.2)))
    assert "train 2 times as many per second" in only(larger).action


def test_what_is_measured_is_not_said_to_be_more_than_is_possible() -> None:
    noisy = (timed("as it is", 0.1), Variant("fp32", (0.08, 0.112, 0.111, 0.13, 0.09)))
    found = only(small(fp32_product_share=0.01, variants=noisy))
    assert (found.severity, found.code) == ("note", "model-too-small")
    assert "at best 1.01 times the speed is possible; measured: no difference beyond noise." in found.message


def test_what_is_known_already_is_not_said_in_other_words() -> None:
    off = (Reason("autocast off", "a", FORWARD),)
    assert only(small(reasons=off)).code == "autocast-off"
    emulated = machine(formats=(Format("fp32", "native", "", 1.0), Format("bf16", "emulated", "", 2.0)))
    assert not list(speed_findings(small(), emulated))


def test_a_step_that_is_slower_all_the_same() -> None:
    slow = step(variants=(timed("as it is", 0.2), timed("fp32", 0.1)))
    found = only(slow)
    assert (found.severity, found.code) == ("warning", "not-faster")
    assert "0.5 times as fast" in found.message
    kernels = replace(slow, slower=(SlowProduct("net.conv", "convolution", 0.1, 0.01),))
    assert "`convolution` in module `net.conv` takes 100 ms, and 10 ms in fp32" in only(kernels).message
    assert only(kernels).action.startswith("The kernels of this version of torch")
    casts = replace(slow, casts=(CastSite("weight", "net", 4, 2**20, 0.04),))
    assert "casts take 40 ms" in only(casts).message
    larger = replace(slow, variants=(*slow.variants, timed("4 times the batch", 0.2)))
    assert only(larger).action.startswith("Use a larger batch")


def test_one_round_is_no_evidence() -> None:
    once = (timed("as it is", 0.1, rounds=1), timed("fp32", 0.1, rounds=1))
    assert not list(speed_findings(step(variants=once), machine()))
    faster = (timed("as it is", 0.1, rounds=2), timed("fp32", 0.18, rounds=2))
    assert not list(speed_findings(small(variants=faster), machine()))


def test_no_speed_is_promised_where_fp32_was_not_timed() -> None:
    assert not list(speed_findings(step(variants=(Variant("as it is", (0.1,)),)), machine()))
