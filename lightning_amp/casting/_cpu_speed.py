"""Measure in a tenth of a second whether half precision is faster than float32 on this CPU.

`"auto"` decides by the result, and the doctor and the demo print it. Both formats run in turns, so that a machine that
becomes busy slows down both. `SpeedComparison` decides which claim about their speed the rounds support.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal

import torch
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from lightning_amp.measure import SpeedComparison, in_rounds

ProbeKind = Literal["products", "convolutions"]
Run = Callable[[], object]

PROBE_S = 0.1
"""Time limit in seconds for one kind of probe, including its warm-up. The last round may overrun it."""
_MOST_ROUNDS = 25
"""With 20 % noise, 9 rounds nearly always detect a format that is 1.5 times as slow; 15 rounds mostly detect 1.2."""
_LEVEL = 0.99
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS = ((64, 128, 128), (128, 192, 192))
_IMAGES = (2, 32, 14, 14)


@cache
def cpu_speed(precision: Literal["bf16", "fp16"] = "bf16", kind: ProbeKind = "products") -> SpeedComparison | None:
    """Return how many times as fast `precision` is as fp32 on this CPU, measured once per process.

    Its `str()` is the claim: `2.1x as fast (1.9 to 2.3)`. `None` if the clock is too coarse.
    """
    return measure_cpu_speed(precision, kind)


def measure_cpu_speed(
    precision: Literal["bf16", "fp16"],
    kind: ProbeKind,
    *,
    most_s: float = PROBE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> SpeedComparison | None:
    """Measure the comparison that :func:`cpu_speed` remembers.

    `"products"` are matrix products of two sizes, `"convolutions"` are 3 x 3 with stride 1 and 2. Each is computed in
    the shapes of its forward and of its backward. Random state, default dtype, number of threads and grad mode are not
    touched. It builds no autograd graph, because a process that ran a backward cannot be forked.
    """
    workload = _products if kind == "products" else _convolutions
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return compare_runs(workload(_DTYPES[precision]), workload(torch.float32), most_s=most_s, clock=clock)


def compare_runs(
    contestant: Run, reference: Run, *, most_s: float, clock: Callable[[], float]
) -> SpeedComparison | None:
    """Compare two runs, round by round; return `None` if no round took any time."""
    began = clock()

    def timed(run: Run) -> Callable[[], float]:
        def seconds() -> float:
            start = clock()
            run()
            return clock() - start

        return seconds

    def takes_part(number: int) -> Iterable[str]:
        over = number >= _MOST_ROUNDS or (number and not clock() - began < most_s)
        return () if over else ("contestant", "reference")

    seconds = in_rounds({"contestant": timed(contestant), "reference": timed(reference)}, takes_part)
    return SpeedComparison.of_rounds(seconds["contestant"], seconds["reference"], _LEVEL)


def _products(dtype: torch.dtype) -> Run:
    """Return the products of two linear layers: `x W^T`, `g W` and `g^T x`."""
    layers = [
        (_values(rows, columns), _values(outputs, columns), _values(rows, outputs))
        for rows, columns, outputs in _PRODUCTS
    ]
    cast = [tuple(tensor.to(dtype) for tensor in layer) for layer in layers]

    def run() -> None:
        for x, weight, gradient in cast:
            _ = x @ weight.t(), gradient @ weight, gradient.t() @ x

    return run


def _convolutions(dtype: torch.dtype) -> Run:
    """Return two 3 x 3 convolutions, with stride 1 and 2, and their gradients."""
    x, weight = _values(*_IMAGES).to(dtype), _values(_IMAGES[1], _IMAGES[1], 3, 3).to(dtype)

    def run() -> None:
        for stride in (1, 2):
            y = functional.conv2d(x, weight, stride=stride, padding=1)
            conv2d_input(list(x.shape), weight, y, stride=stride, padding=1)
            conv2d_weight(x, list(weight.shape), y, stride=stride, padding=1)

    return run


def _values(*shape: int) -> torch.Tensor:
    """Return fixed values between -1 and 1, without using a random generator."""
    count = math.prod(shape)
    return torch.arange(count, dtype=torch.float32, device="cpu").sin_().reshape(shape)
