"""The decision behind a report: no page recommends two precisions or contradicts itself."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from support.doctor_facts import (
    convolution,
    explicit_cast,
    in_fp32_modules,
    machine,
    machine_with,
    noisy,
    product,
    speed,
    step,
    timed,
    without_autocast,
)

from lightning_amp.advice import DoctorReport, Machine, Step
from lightning_amp.advice._decision import decide
from lightning_amp.advice._machine import Convolution, Format, Product
from lightning_amp.advice._record import OptimizerFacts, Recording, Variant
from lightning_amp.measure import BACKWARD

NUM_PAGES = 1500

_ADVICE = re.compile(r"""[Uu]se (?:`AmpPrecision\()?"(\w+)"|[Ss]tay in "?(\w+)"?""")


@pytest.mark.parametrize(
    ("on", "use", "basis"),
    [
        (machine_with(bf16=4.0), "bf16", "products"),
        (machine_with(bf16=0.5), "fp32", "products"),
        (machine_with(bf16=1.0), "fp32", "products"),
        (machine_with(bf16=0.5, fp16=2.0), "fp16", "products"),
        (machine_with(bf16=speed(1.0, noise=0.5)), None, "products"),
        (machine_with(bf16=None), None, "nothing"),
        (machine(formats=(Format("fp32", "native", ""),), products=(), precision="fp32"), "fp32", "support"),
    ],
)
def test_a_machine_is_judged_by_its_products(on: Machine, use: str | None, basis: str) -> None:
    found = decide(on, on.precision)
    assert (found.use, found.basis) == (use, basis)


@pytest.mark.parametrize(
    ("ratio", "rounds", "use"), [(2.0, 9, "bf16"), (0.5, 9, "fp32"), (1.0, 9, None), (0.5, 1, None)]
)
def test_a_step_is_judged_by_its_own_race_and_not_by_products(ratio: float, rounds: int, use: str | None) -> None:
    variants = (timed("as it is", 0.1, rounds=rounds), timed("fp32", 0.1 * ratio, rounds=rounds))
    for on in (machine_with(bf16=4.0), machine_with(bf16=None)):
        assert decide(on, "bf16", step(variants=variants)).use == use
    assert decide(machine(), "fp32", step(variants=variants)).use is None


def test_the_page_of_a_slow_cpu_with_bf16_instructions_recommends_fp32_alone() -> None:
    page = str(DoctorReport(machine_with(bf16=0.56)))
    assert set(advised(page)) == {"fp32"}


def advised(page: str) -> list[str]:
    return [first or second for first, second in _ADVICE.findall(page)]


def random_machine(rng: random.Random) -> Machine:
    formats, products, convolutions = [Format("fp32", "native", "", 1.0, 256)], [Product("fp32", 256, 1.0)], []
    for name in ("bf16", "fp16", "fp8"):
        support: Any = rng.choice(["native", "partial", "emulated", "missing"])
        ratio = rng.choice([0.01, 0.3, 0.9, 1.0, 1.1, 2.0, 8.0])
        formats.append(Format(name, support, f"reason of {name}", ratio, 256))
        if support != "missing" and rng.random() < 0.9:
            products.append(Product(name, 256, ratio, random_speed(rng, ratio)))
            convolutions += [
                Convolution(name, part, 2, random_speed(rng, rng.choice([0.01, 1.0, 2.0])))
                for part in ("forward", "backward")
            ]  # fmt: skip
    runs = [f.name for f in formats if f.support != "missing" and f.name != "fp8"]
    return machine(
        formats=tuple(formats), products=tuple(products), convolutions=tuple(convolutions),
        precision=rng.choice(runs), precision_reason="a reason",
    )  # fmt: skip


def random_speed(rng: random.Random, ratio: float) -> Any:
    return speed(ratio, noise=rng.choice([0.001, 0.02, 0.7]), rounds=rng.choice([1, 3, 9, 18]))


def random_step(rng: random.Random, precision: str) -> Step:
    rounds = rng.choice([1, 3, 9, 18])
    ratio = rng.choice([0.01, 0.3, 0.9, 1.0, 1.1, 2.0, 8.0])

    def variant(label: str, seconds: float) -> Variant:
        return noisy(label, seconds, rounds=rounds, noise=rng.choice([0.001, 0.02, 0.7]))

    variants = [variant("as it is", 0.1), variant("fp32", 0.1 * ratio)]
    if rng.random() < 0.2:
        variants.pop()
    for label in ("fused=True", "channels_last", "without fp32_modules", "4 times the batch"):
        if rng.random() < 0.5:
            variants.append(variant(label, rng.choice([0.05, 0.08, 0.1, 0.2])))
    optimizer = rng.choice([0.002, 0.05])
    slow_kernel = {"name": "convolution_backward", "part": BACKWARD}
    extra = [
        rng.choice([(), (without_autocast(2 * 10**8),), (in_fp32_modules("b", 2 * 10**8),)]),
        rng.choice([(), (product(**slow_kernel, seconds=0.5),)]),
        rng.choice([(), [explicit_cast(0.005, 2**17)] * 8]),
        rng.choice([(), (convolution(10**8),)]),
    ]
    return step(
        *itertools.chain(*extra),
        fp32_recorded=Recording((product(**slow_kernel, seconds=0.01),)),
        precision=precision,
        variants=tuple(variants),
        parts={"data": rng.choice([0.001, 0.1]), "forward": 0.03, "backward": 0.06, "optimizer": optimizer},
        fp32_product_share=rng.choice([0.0, 0.05, 0.5, 0.9]),
        optimizers=(OptimizerFacts("AdamW", True, 1000),),
    )


def test_no_page_recommends_two_things_or_denies_what_it_recommends() -> None:
    rng = random.Random(0)
    seen: set[str | None] = set()
    for _ in range(NUM_PAGES):
        on = random_machine(rng)
        looked_at = rng.choice([f.name for f in on.formats])
        runs = [f.name for f in on.formats if f.support != "missing"]
        facts = random_step(rng, rng.choice(runs)) if rng.random() < 0.7 else None
        report = DoctorReport(on, facts, None if facts is not None else looked_at)
        use, page = report.decision.use, str(report)
        codes = {finding.code: finding for finding in report.findings}
        assert set(advised(page)) <= {use} - {None}, page
        seen.add(use)
        if use is not None and use != "fp32":  # it is faster: nothing says that it is not
            assert not {"not-faster", "model-too-small", "no-faster-products"} & codes.keys() or looked_at != use, page
            assert f'Do not train in "{use}"' not in page
        if use is not None and report.decision.advises_against and facts is not None:
            assert report.has_problems, page
            assert "nothing-to-do" not in codes, page
        if use is None:  # only a format that does not run at all is an error then
            wrong = [f.message for f in report.findings if f.severity == "error"]
            assert all(" has no " in message for message in wrong), page
        for found in on.formats:  # the table of the machine, beside its verdict
            speed_of = on.speed(found.name)
            if facts is None and use == found.name != "fp32":
                assert speed_of is not None
                assert speed_of.claim == "faster"
        assert "times as fast" not in page
        assert "middle half" not in page
    assert seen == {"fp32", "bf16", "fp16", "fp8", None}


def test_an_emulated_step_whose_rounds_do_not_decide_is_judged_by_its_products() -> None:
    variants = (timed("as it is", 0.4, rounds=9), noisy("fp32", 0.1, noise=0.99))
    found = decide(machine(), "fp16", step(precision="fp16", variants=variants))
    assert (found.use, found.basis) == ("fp32", "products")
    assert decide(machine_with(fp16=0.1), "fp16", step(precision="fp16", variants=variants)).use is None
    page = DoctorReport(machine_with(fp16=0.1), step(precision="fp16", variants=variants)).findings[0].message
    assert "Nothing to do" not in page
