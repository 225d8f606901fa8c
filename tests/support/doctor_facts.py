"""The measurements of a healthy machine and a healthy step, which each test changes as it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_amp._user_line import Place
from lightning_amp.advice._machine import Format, Machine, Product, compare
from lightning_amp.advice._step import (
    BACKWARD,
    FORWARD,
    REST,
    Loading,
    Memory,
    Operation,
    OptimizerFacts,
    Recording,
    Step,
    Variant,
    Wait,
)
from lightning_amp.advice.findings import ALL
from lightning_amp.advice.findings._finding import Finding, decide
from lightning_amp.measure import SpeedComparison

MIB = 2**20
FORWARD_FLOPS = 3 * 10**8
LINE = Place("nowhere.py", 7)


def speed(ratio: float, *, noise: float = 0.01, rounds: int = 9) -> SpeedComparison:
    """Return a comparison whose rounds lie around a ratio. With much noise it is undecided."""
    seconds = [(1 + noise * (-1) ** number) / ratio for number in range(rounds)]
    found = compare(seconds, [1.0] * rounds)
    assert found is not None
    return found


def machine_with(**ratios: float | SpeedComparison | None) -> Machine:
    """Return a machine with instructions for these formats, whose products have these speeds relative to fp32."""
    speeds = {name: speed(r) if isinstance(r, (float, int)) else r for name, r in ratios.items()}
    mixed = [Format(name, "native", f"avx512_{name}") for name in speeds]
    products = [Product(name, 256, s.ratio, s) for name, s in speeds.items() if s is not None]
    return machine(formats=(Format("fp32", "native", ""), *mixed), products=(Product("fp32", 256, 1.0), *products))


def machine(**changes: Any) -> Machine:
    found = Machine(
        device="a CPU, 2 threads",
        device_type="cpu",
        memory_gib=16.0,
        versions={"torch": "2.13.0"},
        formats=(
            Format("fp32", "native", ""),
            Format("bf16", "native", "avx512_bf16"),
            Format("fp16", "emulated", "this CPU has no instructions for fp16"),
            Format("fp8", "missing", "no matrix units for it"),
        ),
        products=(
            Product("fp32", 256, 1.0),
            Product("bf16", 256, 4.0, speed(4.0)),
            Product("fp16", 256, 0.1, speed(0.1)),
        ),
        tf32=None,
        precision="bf16",
        precision_reason="this CPU has bfloat16 instructions",
    )
    return replace(found, **changes)


# -- operations --------------------------------------------------------------------------------------------------------


def product(module: str = "net", dtype: str = "bfloat16", flops: int = 100, **changes: Any) -> Operation:
    return Operation(**{"name": "mm", "part": FORWARD, "module": module, "dtype": dtype, "flops": flops, **changes})


def without_autocast(flops: int, place: Place | None = LINE, **changes: Any) -> Operation:
    return product("Net", "float32", flops, place=place, **changes)


def in_fp32_modules(module: str, flops: int) -> Operation:
    return product(module, "float32", flops, in_fp32_module=True)


def cast(seconds: float = 0.1, num_bytes: int = 10, **changes: Any) -> Operation:
    own = {"name": "_to_copy", "part": FORWARD, "module": "net", "cast_bytes": num_bytes, "seconds": seconds}
    return Operation(**{**own, **changes})


def explicit_cast(seconds: float = 0.1, num_bytes: int = 10, place: Place = LINE) -> Operation:
    return cast(seconds, num_bytes, asked="torch.Tensor.float", place=place)


def convolution(flops: int, *, channels_last: bool = False) -> Operation:
    return product(flops=flops, name="convolution", is_convolution=True, channels_last=channels_last)


def recorded(
    *extra: Operation, recorded_s: float = 0.1, product_s: float = 0.05, waits: tuple[Wait, ...] = (), **more: Any
) -> Recording:
    """Return a step of 10^9 FLOPs, 3 10^8 of them in the forward; `extra` operations replace some of these."""
    forward = FORWARD_FLOPS - sum(o.flops for o in extra if o.part == FORWARD)
    products = (
        product(flops=max(1, forward), seconds=0.3 * product_s),
        product(part=BACKWARD, flops=7 * 10**8, seconds=0.7 * product_s),
    )
    rest_s = recorded_s - product_s - sum(operation.seconds for operation in extra)
    return Recording((*products, *extra, Operation("gelu", REST, seconds=rest_s)), waits=waits, **more)


def in_fp32(share: float) -> Recording:
    """Return a step in fp32 that takes 0.25 s, of which matrix products take this share on `machine()`."""
    products = product(dtype="float32", flops=10**12, seconds=0.25 * share)
    return Recording((products, Operation("gelu", REST, seconds=0.25 * (1 - share))))


def step(*extra: Operation, **changes: Any) -> Step:
    """Return a healthy step with extra operations; `changes` are arguments of :func:`recorded` or fields of `Step`."""
    own = {name: changes.pop(name) for name in ("recorded_s", "product_s", "waits", "losses") if name in changes}
    found = Step(
        precision="bf16",
        plugin="AmpPrecision('bf16')",
        batch_size=64,
        num_parameters=1000,
        parts={"data": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.002, "rest": 0.001},
        num_timed=20,
        recorded=recorded(*extra, **own),
        fp32_recorded=in_fp32(0.8),
        memory=Memory(10 * MIB, 10 * MIB, 20 * MIB, 0, 0, 100 * MIB, 140 * MIB),
        fp32_memory=Memory(10 * MIB, 10 * MIB, 20 * MIB, 0, 0, 180 * MIB, 220 * MIB),
        optimizers=(OptimizerFacts("AdamW", False, 1000),),
        loading=Loading(0),
        variants=(Variant("as it is", (0.1,) * 5), Variant("fp32", (0.25,) * 5)),
    )
    return replace(found, **changes)


def timed(label: Any, seconds: float, *, rounds: int = 5) -> Variant:
    return Variant(label, (seconds,) * rounds)


def noisy(label: Any, seconds: float, *, rounds: int = 9, noise: float = 0.6) -> Variant:
    return Variant(label, tuple(seconds * (1 + noise * (-1) ** number) for number in range(rounds)))


# -- findings ----------------------------------------------------------------------------------------------------------


def said(facts: Step, on: Machine | None = None) -> list[Finding]:
    """Return the findings about a step, in their order."""
    on = on or machine()
    found = [find(facts, on, decide(on, facts.precision, facts)) for find in ALL]
    return [finding for finding in found if finding is not None]


def only(facts: Step, on: Machine | None = None) -> Finding:
    found = said(facts, on)
    assert len(found) == 1, found
    return found[0]
