"""Findings: the fact, the rule and the sentence of each, from made-up measurements; and the decision behind them."""

from __future__ import annotations

import itertools
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import (
    FORWARD_FLOPS,
    LINE,
    MIB,
    cast,
    convolution,
    explicit_cast,
    in_fp32,
    in_fp32_modules,
    machine,
    machine_with,
    noisy,
    only,
    product,
    said,
    speed,
    step,
    timed,
    without_autocast,
)

from lightning_amp._user_line import Place
from lightning_amp.advice import DoctorReport
from lightning_amp.advice._machine import Format, Machine, Product
from lightning_amp.advice._step import (
    BACKWARD,
    Loading,
    Loss,
    Memory,
    Operation,
    OptimizerFacts,
    Recording,
    Step,
    Unaligned,
    Variant,
    Wait,
)
from lightning_amp.advice.findings._finding import decide
from lightning_amp.advice.findings._products import emulated_precision, unaligned_products
from lightning_amp.measure import SpeedComparison

PARTS = step().parts
GPU = machine(device_type="cuda")
SMALL = machine(memory_gib=1.0)
"""A device so small that these steps fill a good part of it."""


def test_a_healthy_step_has_no_finding() -> None:
    assert said(step()) == []


# -- overflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"num_bad": 3, "num_seen": 12},
            "3 of 12 steps in bf16 do not train: the loss or gradients are infinite or NaN",
        ),
        ({"num_bad": 1, "bad_loss": True, "parts": {}, "variants": ()}, "the loss is infinite or NaN. So no step was"),
        (
            {"num_bad": 1, "parts": {}, "variants": ()},
            "1 of 1 step in bf16 do not train: gradients are infinite or NaN.",
        ),
    ],
)
def test_an_overflow(facts: Any, text: str) -> None:
    found = only(step(**facts))
    assert (found.severity, found.code) == ("error", "overflow")
    assert text in found.message


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait_s", "loading", "severity", "action"),
    [
        # without workers a step takes what loading and computing take: workers do both at once
        (0.09, Loading(0), "warning", "Pass `num_workers=2, persistent_workers=True` to the DataLoader: workers load"),
        (0.27, Loading(0), "warning", "Pass `num_workers=3,"),
        (0.015, Loading(0), "note", "which can make it 1.2x as fast at most (not tried)"),
        # each of the workers takes two steps for a batch
        (0.09, Loading(2), "warning", "Pass `num_workers=4,"),
        (0.09, Loading(8, persistent=True), "warning", "Do less per item"),
        (
            0.09,
            Loading(8),
            "warning",
            "Pass `persistent_workers=True` to the DataLoader: its workers start anew",
        ),
        (0.09, Loading(0, is_stream=True), "warning", "if the `IterableDataset` gives each worker its own rows"),
        (0.09, None, "warning", "Make the loader faster"),
    ],
)
def test_a_step_that_waits_for_its_batch(
    wait_s: float, loading: Any, severity: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = only(step(parts={"data": wait_s, "forward": 0.03, "backward": 0.06}, loading=loading))
    assert (found.severity, found.code) == (severity, "data-bound")
    assert f"waits {wait_s * 1e3:.3g} ms" in found.message
    assert action in found.action


def test_workers_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = only(step(parts={"data": 0.9, "forward": 0.1}, loading=Loading(0)))
    assert "`num_workers=2," in found.action
    assert "2.2x as fast at most" in found.action  # 0.45 s for a batch, where a step computes 0.1 s


def test_the_host_waits() -> None:
    facts = step(waits=(Wait("a.py:1", ".item()", 3), Wait("b.py:2", "nonzero", 1)))
    found = only(facts, GPU)
    assert (found.severity, found.code) == ("warning", "host-waits")
    assert "4 times in a step: .item() in a.py:1, and in 1 other place" in found.message
    on_cpu = only(facts)
    assert on_cpu.severity == "note"
    assert "On a CPU that is free" in on_cpu.message


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
    assert "`fused=True` was not timed" in only(slow).message
    assert not said(step(optimizers=plain))  # it takes no time
    assert not said(replace(slow, optimizers=(OptimizerFacts("Adam", False, 1000),)))


def test_channels_last_is_advised_only_where_it_gains() -> None:
    facts = step(convolution(FORWARD_FLOPS))
    assert only(facts).severity == "note"
    tried = replace(facts, variants=(*facts.variants, timed("channels_last", 0.05)))
    assert (only(tried).severity, only(tried).code) == ("warning", "channels-last")
    assert "memory_format=torch.channels_last" in only(tried).action
    slower = replace(facts, variants=(*facts.variants, timed("channels_last", 0.3)))
    assert only(slower).action.startswith("Leave it as it is")
    noise = replace(facts, variants=(*facts.variants, Variant("channels_last", (0.05, 0.2, 0.05, 0.2, 0.05))))
    assert only(noise).action.startswith("The race is undecided. Time `channels_last` by itself")
    assert not said(step(convolution(FORWARD_FLOPS, channels_last=True), variants=tried.variants))


def test_adamw_at_three_per_cent_of_a_step_cannot_give_1_18x() -> None:
    parts = {"data": 0.05, "forward": 0.4, "backward": 0.57, "optimizer": 0.03}
    raced = (timed("as it is", 1.0, rounds=9), timed("fused=True", 1 / 1.18, rounds=9))
    facts = step(parts=parts, optimizers=(OptimizerFacts("AdamW", True, 1000),), variants=raced)
    assert facts.most_gain("fused=True") == pytest.approx(1 / 0.97)
    assert facts.speed("fused=True") is not None
    assert facts.gain("fused=True") is None
    report = DoctorReport(machine(), facts)
    assert "1.18" not in str(report)
    assert not report.has_problems


# -- products and casts ------------------------------------------------------------------------------------------------

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
WHY: dict[str, Any] = {
    "where autocast is turned off": {},
    "in float64": {"dtype": "float64"},
    "in operations that autocast does not compute": {"autocast": True},
    "in attention that torch computes": {"autocast": True, "asked": ATTENTION},
}


def kept(why: str, where: str, flops: int) -> Operation:
    place = Place(where, 7) if where else None
    return product(**{"module": "", "dtype": "float32", "flops": flops, "place": place, **WHY[why]})


@pytest.mark.parametrize("why", WHY)
def test_products_that_stay_in_fp32(why: str) -> None:
    found = only(step(kept(why, "net.py", FORWARD_FLOPS // 2), kept(why, "", 2), kept(why, "c.py", 1)))
    assert (found.severity, found.code) == ("warning", "autocast-off")
    assert found.message.startswith("50 % of the FLOPs of the forward stay in full precision, " + why)
    assert "net.py:7; " in found.message
    assert ", and 1 other place)" in found.message
    assert only(step(kept(why, "net.py", FORWARD_FLOPS // 20))).severity == "note"
    assert not said(step(kept(why, "net.py", FORWARD_FLOPS // 100)))
    assert not said(step(kept(why, "net.py", FORWARD_FLOPS // 2), precision="fp32"))


def test_several_reasons_are_one_finding() -> None:
    first, second, *_ = WHY
    found = only(step(kept(first, "a.py", FORWARD_FLOPS // 10), kept(second, "b.py", FORWARD_FLOPS // 5)))
    assert found.message.index(second) < found.message.index(first)
    assert found.action.startswith("Make the tensors float32")


def test_fp32_modules_that_hold_most() -> None:
    found = only(step(in_fp32_modules("net.head", FORWARD_FLOPS // 2)))
    assert (found.severity, found.code) == ("warning", "fp32-modules-dominate")
    assert "`net.head`" in found.message
    assert "find_fp32_modules" in found.action
    assert only(step(in_fp32_modules("net.head", FORWARD_FLOPS // 5))).severity == "note"
    assert not said(step(in_fp32_modules("net.head", FORWARD_FLOPS // 20)))


def casts(kind: str, count: int, seconds: float) -> list[Operation]:
    own: dict[str, Any] = {"explicit": {"asked": "torch.Tensor.float", "place": LINE}, "again": {"cast_of": 5}}[kind]
    first = [] if kind == "explicit" else [cast(0.0, 0, cast_of=5, cast_bytes=1)]  # autocast's own
    return [*first, *(cast(seconds / count, 3 * 2**20 // count, **own) for _ in range(count))]


@pytest.mark.parametrize(
    ("kind", "seconds", "count", "severity", "action"),
    [
        ("explicit", 0.03, 4, "warning", "Take the casts out"),
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
    by_hand = cast(cast_of=1000, asked="torch.Tensor.to", place=LINE)  # autocast would have cast it here
    lstm = [cast(cast_of=5, asked="torch._VF.lstm") for _ in range(9)]
    assert not said(step(*weights, by_hand, *lstm, cast(part=BACKWARD, seconds=0.0)))


def test_one_slow_call_on_a_busy_machine_is_no_warning() -> None:
    """Of ten casts of the same size, the one in user code happened to take a hundred times as long."""
    usual = [cast(0.0001, 4096, cast_of=i + 1) for i in range(9)]
    (slow,) = casts("explicit", 1, 0.01)
    assert not said(step(*usual, replace(slow, cast_bytes=4096)))


def test_many_casts_of_a_few_bytes_are_no_warning_whatever_a_busy_machine_does() -> None:
    """The fault: a recurrent network of tiny operations had "many casts" when some calls were slow by chance."""
    calls = [replace(product(flops=0), name="view", seconds=1e-5) for _ in range(600)]
    again = [cast(1.2e-5 if i % 4 else 1e-3, 1536, cast_of=5) for i in range(80)]
    found = only(step(*calls, *again, recorded_s=0.01))
    assert (found.severity, found.code) == ("note", "many-casts")


def test_sizes_that_are_not_aligned_are_found() -> None:
    sizes = (64, 33, 100)
    facts = step(
        product("b", sizes=sizes, flops=10), product("b", sizes=sizes, part=BACKWARD, flops=10),
        product("c", sizes=(64, 48, 4), flops=9), product("d", sizes=(64, 33, 64), dtype="float32"),
    )  # fmt: skip
    found = unaligned_products(facts)
    assert found == Unaligned(pytest.approx(20 / 10**9), sizes, (64, 40, 104), "bf16", "b")
    wider = unaligned_products(replace(facts, precision="fp8"))
    assert wider is not None
    assert wider.padded == (64, 48, 112)
    assert unaligned_products(step(product("b", sizes=(64, 32, 96)))) is None


def head(ratio: float, share: float = 1.0, **changes: Any) -> Unaligned:
    found = Unaligned(share, (64, 33, 4001), (64, 40, 4008), "bf16", "head", speed(ratio))
    return replace(found, **changes)


def test_sizes_that_are_not_multiples() -> None:
    found = only(step(unaligned=head(2.0)))
    assert (found.severity, found.code) == ("warning", "sizes-not-aligned")
    assert "`head` (64 x 33 x 4001); padded to 64 x 40 x 4008, measured here: 2.00x as fast" in found.message
    assert found.message.endswith("If all gain as much, a step saves 25 %.")  # products are half of the step
    assert "(33 to 40, 4001 to 4008)" in found.action
    nothing = only(step(unaligned=head(1.0)))
    assert (nothing.severity, nothing.action) == ("note", "Leave them as they are: padding gains nothing here.")
    assert "padded to 64 x 40 x 4008, measured here: as fast within 5 %" in nothing.message
    unsure = only(step(unaligned=head(2.0, padded_speed=speed(2.0, noise=0.8))))
    assert unsure.severity == "note"
    assert "undecided" in unsure.message
    little = only(step(unaligned=head(2.0, share=0.1)))
    assert little.severity == "note"
    assert "a step saves 2.5 %" in little.message
    assert not said(step(unaligned=head(2.0, share=0.01)))


def test_padding_for_fp8_is_not_claimed_to_gain() -> None:
    """The fault: such products run in bf16, and padded ones were timed in bf16 as well."""
    facts = step(precision="fp8", unaligned=head(2.0, format="bf16", padded_speed=None))
    found = next(found for found in said(facts) if found.code == "sizes-not-aligned")
    assert (found.severity, found.code) == ("note", "sizes-not-aligned")
    assert "multiples of 16" in found.message
    assert "fp8 needs such multiples" in found.message
    assert "measured" not in found.message
    assert found.action.endswith("Not tried.")


# -- no faster than fp32 -----------------------------------------------------------------------------------------------


def raced(own_s: float, fp32_s: float, rounds: int = 9, **facts: Any) -> Step:
    return step(variants=(timed("as it is", own_s, rounds=rounds), timed("fp32", fp32_s, rounds=rounds)), **facts)


def test_a_module_too_small() -> None:
    found = only(raced(0.1, 0.1, fp32_recorded=in_fp32(0.05)))
    assert (found.severity, found.code) == ("warning", "model-too-small")
    assert "are 5 % of a step in fp32. They alone make a step 1.04x as fast at best; measured: as fast" in found.message
    assert "not tried here" in found.action
    assert not said(raced(0.1, 0.2, fp32_recorded=in_fp32(0.05)))  # it is faster
    assert not said(raced(0.1, 0.1, fp32_recorded=in_fp32(0.9)))
    slower = only(raced(0.2, 0.1, fp32_recorded=in_fp32(0.05)))
    assert slower.action.startswith('Use `AmpPrecision("fp32")`.')
    explained = [finding.code for finding in said(raced(0.1, 0.1, fp32_recorded=in_fp32(0.05)), machine_with(bf16=4.0))]
    assert explained == ["model-too-small"]


def test_another_cause_explains_a_step_that_is_no_faster() -> None:
    facts = raced(0.1, 0.1)
    off = step(without_autocast(10**8), variants=facts.variants, fp32_recorded=in_fp32(0.05))
    assert [finding.code for finding in said(off)] == ["autocast-off"]


def test_a_kernel_that_is_slow_in_half_precision() -> None:
    """Products are faster on this machine, but this one takes as long as in software."""
    slow, fast = (product(name="convolution_backward", part=BACKWARD, seconds=s) for s in (0.9, 0.06))
    facts = raced(1.0, 0.1, fp32_recorded=Recording((fast,)))
    found = only(replace(facts, recorded=Recording((slow, *facts.recorded.operations))))
    assert (found.severity, found.code) == ("error", "emulated-precision")
    assert "A step in it: 10.00x as slow as in fp32" in found.message
    assert "`convolution_backward` in the backward takes 900 ms, and 60 ms in fp32" in found.message
    assert found.action == 'Use `AmpPrecision("fp32")`.'


def emulated(on: Machine, precision: str) -> Any:
    return emulated_precision(None, on, decide(on, precision))


def test_a_format_that_is_emulated_or_missing() -> None:
    found = emulated(machine(), "fp16")
    assert (found.severity, found.code) == ("error", "emulated-precision")  # bf16 is faster here
    assert found.message.startswith(
        "fp16 is emulated here (this CPU has no instructions for fp16): its matrix products"
    )
    assert "10.0x as slow as in fp32" in found.message
    assert found.action == 'Use `AmpPrecision("bf16")`.'
    missing = emulated(machine(), "fp8")
    assert missing.severity == "error"
    assert "has no fp8: no matrix units for it" in missing.message
    assert emulated(machine(), "bf16") is None
    slow = emulated(machine_with(bf16=0.5), "bf16")
    assert (slow.severity, slow.action) == ("error", 'Use `AmpPrecision("fp32")`.')
    assert slow.message.startswith("bf16 is slow here (avx512_bf16): its matrix products")
    assert emulated(machine_with(bf16=speed(0.9, noise=0.5)), "bf16") is None


def test_an_emulated_format_is_judged_by_the_step() -> None:
    no_slower = only(raced(0.1, 0.12, precision="fp16"))
    assert (no_slower.severity, no_slower.action) == ("note", "")
    slower = only(raced(0.4, 0.1, precision="fp16"))
    assert (slower.severity, slower.action) == ("error", 'Use `AmpPrecision("fp32")`.')
    assert "A step in it: 4.00x as slow" in slower.message


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(**parts: int) -> Memory:
    names = ("weights", "gradients", "states", "activations", "logits", "casts")
    held = {name: parts.get(name, 0) * MIB for name in names}
    return Memory(**held, peak=sum(held.values()))


@pytest.mark.parametrize(
    ("logits", "rest", "severity"), [(300, 100, "warning"), (60, 100, "note"), (5, 100, None), (3, 1, "note")]
)
def test_logits(logits: int, rest: int, severity: str | None) -> None:
    facts = step(memory=memory(logits=logits, activations=rest), losses=(Loss(512, 32_000),))
    assert [f.severity for f in said(facts)] == ([severity] if severity else [])
    if severity:
        assert f"512 x 32,000, hold {logits} MiB" in only(facts).message
        assert "checkpoint(chunk_loss" in only(facts).action


def test_logits_that_are_a_good_part_of_a_small_device_are_a_warning() -> None:
    facts = step(memory=memory(logits=40, activations=100), losses=(Loss(512, 32_000),))
    assert only(facts, SMALL).severity == "warning"
    assert not said(step(memory=memory(logits=40, activations=100), losses=(Loss(10**6, 10),)), SMALL)


def test_states_that_dominate() -> None:
    held = memory(weights=40, gradients=40, states=80, activations=20)
    adam = OptimizerFacts("AdamW", False, 10 * MIB)
    facts = step(memory=held, fp32_memory=held, num_parameters=10 * MIB, optimizers=(adam,))
    found = only(facts, SMALL)
    assert (found.severity, found.code) == ("note", "state-dominates")
    assert "the optimizer hold 160 MiB, 88.9 % of the peak; that is 16 bytes per parameter" in found.message
    assert "the peak is 180 MiB, and 180 MiB in fp32" in found.message
    assert "States in 8 bits (`torchao.optim.AdamW8bit`)" in found.action
    assert only(facts, machine(memory_gib=0.2)).severity == "warning"  # the device is full
    assert not said(facts, machine(memory_gib=16.0))
    no_states = replace(facts, memory=memory(weights=80, gradients=80, states=0, activations=20))
    assert "8 bits" not in only(no_states, SMALL).action


# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "use"),
    [
        (machine_with(bf16=4.0), "bf16"),
        (machine_with(bf16=0.5), "fp32"),
        (machine_with(bf16=1.0), "fp32"),
        (machine_with(bf16=0.5, fp16=2.0), "fp16"),
        (machine_with(bf16=speed(1.0, noise=0.5)), None),
        (machine_with(bf16=None), None),
        (machine(formats=(Format("fp32", "native", ""),), products=(), precision="fp32"), "fp32"),
    ],
)
def test_a_machine_is_judged_by_its_products(on: Machine, use: str | None) -> None:
    assert decide(on, on.precision).use == use


@pytest.mark.parametrize(
    ("ratio", "rounds", "use"), [(2.0, 9, "bf16"), (0.5, 9, "fp32"), (1.0, 9, None), (0.5, 1, None)]
)
def test_a_step_is_judged_by_its_own_race_and_not_by_products(ratio: float, rounds: int, use: str | None) -> None:
    for on in (machine_with(bf16=4.0), machine_with(bf16=None)):
        assert decide(on, "bf16", raced(0.1, 0.1 * ratio, rounds)).use == use
    assert decide(machine(), "fp32", raced(0.1, 0.2, precision="fp32", fp32_recorded=None)).use is None


def test_rounds_that_do_not_decide_are_judged_with_the_products() -> None:
    variants = (timed("as it is", 0.4, rounds=9), noisy("fp32", 0.1, noise=0.99))
    assert decide(machine(), "fp16", step(precision="fp16", variants=variants)).use == "fp32"
    one_run = raced(61.0, 0.61, 1, precision="fp16")
    assert decide(machine(), "fp16", one_run).use == "fp32"


_ADVICE = re.compile(r"""[Uu]se (?:`AmpPrecision\()?"(\w+)"|[Ss]tay with "?(\w+)"?|name "(\w+)\"""")


def advised(page: str) -> set[str]:
    return {name for names in _ADVICE.findall(page) for name in names if name}


def random_speed(rng: random.Random, ratio: float) -> SpeedComparison:
    return speed(ratio, noise=rng.choice([0.001, 0.02, 0.7]), rounds=rng.choice([1, 3, 9, 18]))


def random_machine(rng: random.Random) -> Machine:
    formats, products = [Format("fp32", "native", "")], [Product("fp32", 256, 1.0)]
    for name in ("bf16", "fp16", "fp8"):
        support: Any = rng.choice(["native", "emulated", "missing"])
        ratio = rng.choice([0.01, 0.3, 0.9, 1.0, 1.1, 2.0, 8.0])
        formats.append(Format(name, support, f"reason of {name}"))
        if support != "missing" and rng.random() < 0.9:
            products.append(Product(name, 256, ratio, random_speed(rng, ratio)))
    runs = [f.name for f in formats if f.support != "missing" and f.name != "fp8"]
    return machine(
        formats=tuple(formats), products=tuple(products), precision=rng.choice(runs), precision_reason="a reason"
    )


def random_step(rng: random.Random, precision: str) -> Step:
    rounds = rng.choice([1, 3, 9, 18])
    ratio = rng.choice([0.01, 0.3, 0.9, 1.0, 1.1, 2.0, 8.0])

    def variant(label: str, seconds: float) -> Variant:
        return noisy(label, seconds, rounds=rounds, noise=rng.choice([0.001, 0.02, 0.7]))

    variants = [variant("as it is", 0.1), variant("fp32", 0.1 * ratio)]
    if rng.random() < 0.2:
        variants.pop()
    for label in ("fused=True", "channels_last"):
        if rng.random() < 0.5:
            variants.append(variant(label, rng.choice([0.05, 0.08, 0.1, 0.2])))
    slow_kernel = {"name": "convolution_backward", "part": BACKWARD}
    extra = [
        rng.choice([(), (without_autocast(2 * 10**8),), (in_fp32_modules("b", 2 * 10**8),)]),
        rng.choice([(), (product(**slow_kernel, seconds=0.5),)]),
        rng.choice([(), [explicit_cast(0.005, 2**17)] * 8]),
        rng.choice([(), (convolution(10**8),)]),
    ]
    share = rng.choice([0.0, 0.05, 0.5, 0.9])
    return step(
        *itertools.chain(*extra),
        fp32_recorded=Recording((product(**slow_kernel, seconds=0.01), *in_fp32(share).operations)),
        precision=precision,
        variants=tuple(variants),
        parts={
            "data": rng.choice([0.001, 0.1]), "forward": 0.03, "backward": 0.06, "optimizer": rng.choice([0.002, 0.05])
        },
        optimizers=(OptimizerFacts("AdamW", True, 1000),),
    )  # fmt: skip


def test_no_page_recommends_two_things_or_denies_what_it_recommends() -> None:
    rng = random.Random(0)
    seen: set[str | None] = set()
    for _ in range(1000):
        on = random_machine(rng)
        looked_at = rng.choice([f.name for f in on.formats])
        runs = [f.name for f in on.formats if f.support != "missing"]
        facts = random_step(rng, rng.choice(runs)) if rng.random() < 0.7 else None
        report = DoctorReport(on, facts, None if facts is not None else looked_at)
        use, page = report.decision.use, str(report)
        codes = {finding.code for finding in report.findings}
        assert advised(page) <= {use} - {None}, page
        seen.add(use)
        if use is not None and use != "fp32":  # it is faster: nothing says that it is not
            assert "model-too-small" not in codes or looked_at != use, page
        if use not in (None, report.precision) and facts is not None:
            assert report.has_problems, page
        if use is None:  # only a format that does not run at all is an error then
            wrong = [f.message for f in report.findings if f.severity == "error"]
            assert all(" has no " in message for message in wrong), page
    assert seen == {"fp32", "bf16", "fp16", "fp8", None}
