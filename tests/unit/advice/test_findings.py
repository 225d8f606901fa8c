"""Findings: the fact, the rule and the sentence of each, from made-up measurements; and the decision behind them."""

from __future__ import annotations

import itertools
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from support.approved import assert_approved
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
from lightning_amp.advice import DoctorReport, Finding
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


def raced(own_s: float, fp32_s: float, rounds: int = 9, **facts: Any) -> Step:
    return step(variants=(timed("as it is", own_s, rounds=rounds), timed("fp32", fp32_s, rounds=rounds)), **facts)


ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
WHY: dict[str, Any] = {
    "where autocast is turned off": {},
    "in float64": {"dtype": "float64"},
    "in operations that autocast does not compute": {"autocast": True},
    "in attention that torch computes": {"autocast": True, "asked": ATTENTION},
}


def kept(why: str, where: str, flops: int) -> Operation:
    place = Place(where, 7) if where else None
    return product(**{"module": "Net", "dtype": "float32", "flops": flops, "place": place, **WHY[why]})


def casts(kind: str, count: int, seconds: float) -> list[Operation]:
    own: dict[str, Any] = {"explicit": {"asked": "torch.Tensor.float", "place": LINE}, "again": {"cast_of": 5}}[kind]
    first = [] if kind == "explicit" else [cast(0.0, 0, cast_of=5, cast_bytes=1)]  # autocast's own
    return [*first, *(cast(seconds / count, 3 * 2**20 // count, **own) for _ in range(count))]


def head(ratio: float, share: float = 1.0, **changes: Any) -> Unaligned:
    found = Unaligned(share, (64, 33, 4001), (64, 40, 4008), "bf16", "head", speed(ratio))
    return replace(found, **changes)


def memory(**parts: int) -> Memory:
    names = ("weights", "gradients", "states", "activations", "logits", "casts")
    held = {name: parts.get(name, 0) * MIB for name in names}
    return Memory(**held, peak=sum(held.values()))


Situations = dict[str, Step | tuple[Step, Machine]]


def about_loading() -> Situations:
    """Without workers a step takes what loading and computing take; with workers, the longer of the two."""
    loaders = {
        "no workers": (0.09, Loading(0)), "no workers, three times as slow": (0.27, Loading(0)),
        "no workers, a little slow": (0.015, Loading(0)), "two workers": (0.09, Loading(2)),
        "eight persistent workers": (0.09, Loading(8, persistent=True)), "eight workers": (0.09, Loading(8)),
        "no workers, a stream": (0.09, Loading(0, is_stream=True)), "a loader that says nothing": (0.09, None),
    }  # fmt: skip
    return {
        f"data: {name}": step(parts={"data": wait_s, "forward": 0.03, "backward": 0.06}, loading=loading)
        for name, (wait_s, loading) in loaders.items()
    }


def about_time() -> Situations:
    waits = step(waits=(Wait("a.py:1", ".item()", 3), Wait("b.py:2", "nonzero", 1)))
    slow = step(optimizers=(OptimizerFacts("Adam", True, 1000),), parts={**PARTS, "optimizer": 0.1})
    layout = step(convolution(FORWARD_FLOPS))

    def with_race(facts: Step, *more: Variant) -> Step:
        return replace(facts, variants=(*facts.variants, *more))

    last = Variant("channels_last", (0.05, 0.2, 0.05, 0.2, 0.05))
    return {
        "waits: on a GPU": (waits, GPU), "waits: on a CPU": waits,
        "Adam, fused helps": with_race(slow, timed("fused=True", 0.05)),
        "Adam, fused is useless": with_race(slow, timed("fused=True", 0.1)), "Adam, fused was not timed": slow,
        "Adam, which takes no time": step(optimizers=(OptimizerFacts("Adam", True, 1000),)),
        "Adam, fused already": replace(slow, optimizers=(OptimizerFacts("Adam", False, 1000),)),
        "layout: not tried": layout, "layout: channels_last helps": with_race(layout, timed("channels_last", 0.05)),
        "layout: channels_last is slower": with_race(layout, timed("channels_last", 0.3)),
        "layout: noise": with_race(layout, last),
        "layout: already channels_last": step(
            convolution(FORWARD_FLOPS, channels_last=True), variants=(*layout.variants, timed("channels_last", 0.05))
        ),
    }  # fmt: skip


def about_products() -> Situations:
    first, second, *_ = WHY
    autocasts = [cast(0.0005, 2**20, cast_of=pointer) for pointer in range(1, 101)]
    by_hand = cast(cast_of=1000, asked="torch.Tensor.to", place=LINE)  # autocast would have cast it here
    lstm = [cast(cast_of=5, asked="torch._VF.lstm") for _ in range(9)]
    usual = [cast(0.0001, 4096, cast_of=i + 1) for i in range(9)]
    (slow,) = casts("explicit", 1, 0.01)
    views = [replace(product(flops=0), name="view", seconds=1e-5) for _ in range(600)]
    again = [cast(1.2e-5 if i % 4 else 1e-3, 1536, cast_of=5) for i in range(80)]
    return {
        **{
            f"fp32: {why}": step(kept(why, "net.py", FORWARD_FLOPS // 2), kept(why, "", 2), kept(why, "c.py", 1))
            for why in WHY
        },
        "fp32: half, on a machine that is slow in bf16": (
            step(kept(first, "net.py", FORWARD_FLOPS // 2)), machine_with(bf16=0.5)
        ),
        "fp32: a twentieth": step(kept(first, "net.py", FORWARD_FLOPS // 20)),
        "fp32: a hundredth": step(kept(first, "net.py", FORWARD_FLOPS // 100)),
        "fp32: half, in a run in fp32": step(kept(first, "net.py", FORWARD_FLOPS // 2), precision="fp32"),
        "fp32: two reasons": step(kept(first, "a.py", FORWARD_FLOPS // 10), kept(second, "b.py", FORWARD_FLOPS // 5)),
        **{f"fp32_modules: 1/{n}": step(in_fp32_modules("net.head", FORWARD_FLOPS // n)) for n in (2, 5, 20)},
        "casts: by hand": step(*casts("explicit", 4, 0.03)),
        "casts: by hand, quick": step(*casts("explicit", 4, 0.003)),
        "casts: by hand, quick and many": step(*casts("explicit", 30, 0.0001)),
        "casts: again and again": step(*casts("again", 30, 0.03)),
        "casts: autocast's own": step(*autocasts, by_hand, *lstm, cast(part=BACKWARD, seconds=0.0)),
        "casts: one took 100 times as long on a busy machine": step(*usual, replace(slow, cast_bytes=4096)),
        "casts: of a few bytes, some slow on a busy machine": step(*views, *again, recorded_s=0.01),
        "sizes: padding helps": step(unaligned=head(2.0)), "sizes: padding is useless": step(unaligned=head(1.0)),
        "sizes: noise": step(unaligned=head(2.0, padded_speed=speed(2.0, noise=0.8))),
        "sizes: a tenth": step(unaligned=head(2.0, share=0.1)),
        "sizes: a hundredth": step(unaligned=head(2.0, share=0.01)),
        "sizes: fp8, where padded ones are not timed": step(
            precision="fp8", unaligned=head(2.0, format="bf16", padded_speed=None)
        ),
    }  # fmt: skip


def about_speed() -> Situations:
    small = in_fp32(0.05)
    slow, fast = (product(name="convolution_backward", part=BACKWARD, seconds=s) for s in (0.9, 0.06))
    kernel = raced(1.0, 0.1, fp32_recorded=Recording((fast,)))
    return {
        "small: as fast as fp32": raced(0.1, 0.1, fp32_recorded=small),
        "small: as fast, products are faster": (raced(0.1, 0.1, fp32_recorded=small), machine_with(bf16=4.0)),
        "small: faster": raced(0.1, 0.2, fp32_recorded=small), "small: slower": raced(0.2, 0.1, fp32_recorded=small),
        "large: as fast": raced(0.1, 0.1, fp32_recorded=in_fp32(0.9)),
        "small: without autocast": step(
            without_autocast(10**8), variants=raced(0.1, 0.1).variants, fp32_recorded=small
        ),
        "a kernel that is slow in half precision": replace(
            kernel, recorded=Recording((slow, *kernel.recorded.operations))
        ),
        "fp16 is emulated, the step no slower": raced(0.1, 0.12, precision="fp16"),
        "fp16 is emulated, the step slower": raced(0.4, 0.1, precision="fp16"),
    }  # fmt: skip


def about_memory() -> Situations:
    loss = (Loss(512, 32_000),)
    sizes = ((300, 100), (60, 100), (5, 100), (3, 1))
    held = memory(weights=40, gradients=40, states=80, activations=20)
    adam = (OptimizerFacts("AdamW", False, 10 * MIB),)
    states = step(memory=held, fp32_memory=held, num_parameters=10 * MIB, optimizers=adam)
    without = replace(states, memory=memory(weights=80, gradients=80, states=0, activations=20))
    some = memory(logits=40, activations=100)
    return {
        **{f"logits: {a} of {a + b} MiB": step(memory=memory(logits=a, activations=b), losses=loss) for a, b in sizes},
        "logits: of a small device": (step(memory=some, losses=loss), SMALL),
        "logits: of few classes": (step(memory=some, losses=(Loss(10**6, 10),)), SMALL),
        "states: of a small device": (states, SMALL), "states: of a full device": (states, machine(memory_gib=0.2)),
        "states: of a large device": (states, machine(memory_gib=16.0)), "states: none": (without, SMALL),
    }  # fmt: skip


def about_overflow() -> Situations:
    none: dict[str, Any] = {"parts": {}, "variants": ()}
    return {
        "healthy": step(), "overflow: now and then": step(num_bad=3, num_seen=12),
        "overflow: of each loss": step(num_bad=1, bad_loss=True, **none), "overflow: always": step(num_bad=1, **none),
    }  # fmt: skip


def shown(found: list[Finding]) -> str:
    return "\n".join(
        f"{f.severity} {f.code}" + (f", share {f.share:.3g}" if f.share else "") + f": {f.message}\n  -> {f.action}"
        for f in found
    )  # fmt: skip


def test_what_is_found_of_which_severity_in_which_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    every = [about_overflow, about_loading, about_time, about_products, about_speed, about_memory]
    texts: dict[str, str] = {}
    for name, facts in itertools.chain.from_iterable(some().items() for some in every):
        texts[name] = shown(said(*facts) if isinstance(facts, tuple) else said(facts)) or "nothing"
    formats = {
        "fp16": (machine(), "fp16"), "fp8": (machine(), "fp8"), "bf16": (machine(), "bf16"),
        "bf16, slow": (machine_with(bf16=0.5), "bf16"),
        "bf16, noise": (machine_with(bf16=speed(0.9, noise=0.5)), "bf16"),
    }  # fmt: skip
    for name, (on, precision) in formats.items():
        found = emulated_precision(None, on, decide(on, precision))
        texts[f"a machine alone: {name}"] = shown([found]) if found else "nothing"
    assert_approved("doctor_findings", texts)


def test_workers_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = only(step(parts={"data": 0.9, "forward": 0.1}, loading=Loading(0)))
    assert "`num_workers=2," in found.action  # 0.45 s for a batch, where a step computes 0.1 s


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
