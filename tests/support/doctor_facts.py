"""Facts of a machine and a step in which nothing is wrong; each test changes what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_amp.advice import Format, Loading, Machine, Memory, OptimizerFacts, Product, Step, Variant, compare
from lightning_amp.measure import SpeedComparison

MIB = 2**20


def speed(ratio: float, *, noise: float = 0.01, rounds: int = 9) -> SpeedComparison:
    """Return a comparison whose rounds lie around a ratio: with little noise it is decided, with much it is not."""
    seconds = [(1 + noise * (-1) ** number) / ratio for number in range(rounds)]
    found = compare(seconds, [1.0] * rounds)
    assert found is not None
    return found


def machine_with(**ratios: float | SpeedComparison | None) -> Machine:
    """Return a machine with instructions for these formats, whose products are so fast against fp32."""
    speeds = {name: speed(r) if isinstance(r, (float, int)) else r for name, r in ratios.items()}
    mixed = [Format(name, "native", f"avx512_{name}", s.ratio if s else 0.0, 256) for name, s in speeds.items()]
    products = [Product(name, 256, s.ratio, s) for name, s in speeds.items() if s is not None]
    return machine(
        formats=(Format("fp32", "native", "", 1.0, 256), *mixed), products=(Product("fp32", 256, 1.0), *products)
    )


def machine(**changes: Any) -> Machine:
    found = Machine(
        device="a CPU, 2 threads",
        device_type="cpu",
        memory_gib=16.0,
        versions={"torch": "2.13.0"},
        formats=(
            Format("fp32", "native", "", 1.0, 256),
            Format("bf16", "native", "avx512_bf16", 4.0, 512),
            Format("fp16", "emulated", "this CPU has no instructions for fp16", 0.1, 512),
            Format("fp8", "missing", "no matrix units for it"),
        ),
        products=(
            Product("fp32", 256, 1.0),
            Product("bf16", 256, 4.0, speed(4.0)),
            Product("fp16", 256, 0.1, speed(0.1)),
        ),
        tf32="",
        precision="bf16",
        precision_reason="this CPU has bfloat16 instructions",
    )
    return replace(found, **changes)


def step(**changes: Any) -> Step:
    found = Step(
        precision="bf16",
        plugin="AmpPrecision('bf16')",
        batch_size=64,
        num_parameters=1000,
        parts={"data": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.002, "rest": 0.001},
        num_timed=20,
        callbacks={},
        loading=Loading(0, 0.001),
        flops={"bfloat16": 10**9},
        module_flops={"net": {"bfloat16": 3 * 10**8}},
        product_s=0.05,
        fp32_product_share=0.8,
        slower=(),
        recorded_s=0.1,
        reasons=(),
        unaligned=(),
        alignment=8,
        casts=(),
        waits=(),
        variants=(Variant("as it is", (0.1,) * 5), Variant("fp32", (0.25,) * 5)),
        memory=Memory(10 * MIB, 10 * MIB, 20 * MIB, 100 * MIB, 0, 0, 0, 140 * MIB, 100 * MIB),
        fp32_memory=Memory(10 * MIB, 10 * MIB, 20 * MIB, 180 * MIB, 0, 0, 0, 220 * MIB, 180 * MIB),
        logits=None,
        optimizers=(OptimizerFacts("AdamW", True, False, 8.0, 1000),),
        convolutions=0,
        channels_last=False,
    )
    return replace(found, **changes)


def timed(label: str, seconds: float, *, rounds: int = 5) -> Variant:
    return Variant(label, (seconds,) * rounds)


def noisy(label: str, seconds: float, *, rounds: int = 9, noise: float = 0.6) -> Variant:
    return Variant(label, tuple(seconds * (1 + noise * (-1) ** number) for number in range(rounds)))
