"""Matrix products and convolutions in several formats, timed in rounds: each round runs each of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import conv2d
from typing_extensions import final

from lightning_amp._compat import _aten
from lightning_amp.advice._gains import compare
from lightning_amp.advice._machine import Convolution, Part, Product
from lightning_amp.measure import DeviceClock, in_rounds
from lightning_amp.shadow import is_out_of_memory
from lightning_amp.tracing import fp32_switches, full_precision

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ROUNDS = (3, 9)
"""At least and at most."""
_MOST_CALLS = 5
"""Of one run in a round, of which the median counts."""
_PRODUCT_S, _CONVOLUTION_S = 0.6, 0.2
"""Seconds that one size in one format may take. A size is left out that would take longer, as the smaller one shows."""

_CONVOLUTIONS = 4
"""Of one format: two strides, two parts. The slowest of them is told."""


@final
class Probe(NamedTuple):
    """A call that is timed, named by its format and what it does, and the settings under which it runs."""

    name: str
    run: Callable[[], Any]
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext


def time_probes(
    probes: Mapping[str, Probe],
    device: torch.device,
    most_s: float,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each probe by round.

    Args:
        probes: By name.
        device: Where they run.
        most_s: Seconds that one probe may take. A probe whose first call takes longer runs in one round only.
        failed: Is told of a probe that raises; without it the exception comes out.

    """
    timed = {name: _TimedProbe(probe, device, most_s) for name, probe in probes.items()}
    return in_rounds(timed, lambda number: [name for name, one in timed.items() if one.takes_part(number)], failed)


@final
class _TimedProbe:
    """A probe that counts what it has used of its time."""

    def __init__(self, probe: Probe, device: torch.device, most_s: float) -> None:
        self._probe, self._where, self._most_s = probe, device, most_s
        self._first_s = self._used_s = 0.0
        self._num_calls = 1

    def __call__(self) -> float:
        times = [call_s(self._probe, self._where) for _ in range(self._num_calls)]
        if not self._used_s:
            self._first_s = times[0]
            self._num_calls = max(1, min(_MOST_CALLS, int(self._most_s / _ROUNDS[1] / max(times[0], 1e-9))))
        self._used_s += sum(times)
        return median(times)

    def takes_part(self, number: int) -> bool:
        least = 1 if self._first_s > self._most_s else _ROUNDS[0]
        return number < least or (number < _ROUNDS[1] and self._used_s <= self._most_s)


def call_s(probe: Probe, device: torch.device) -> float:
    """Return the seconds of a call, by the clock of the device."""
    with probe.settings():
        return DeviceClock(device).seconds_of(probe.run)


# -- products ----------------------------------------------------------------------------------------------------------


def products(names: Sequence[str], sizes: Sequence[int], device: torch.device, notes: list[str]) -> Iterator[Product]:
    """Measure square matrix products, small ones first, of all formats in turns.

    Args:
        names: Of formats; against `"fp32"` the others are compared.
        sizes: Rows, columns and depth, the smallest first.
        device: Where.
        notes: Gets what could not be measured.

    """
    last = dict.fromkeys(names, 0.0)
    for size in sizes:
        probes = {n: product(n, (size, size, size), device) for n in last if 8 * last[n] <= _PRODUCT_S}
        found = time_probes(probes, device, _PRODUCT_S, _noted(f"products of {size}", notes, last))
        for name, seconds in found.items():
            last[name] = median(seconds)
            speed = compare(seconds, found.get("fp32", ())) if name != "fp32" else None
            yield Product(name, size, 2 * size**3 / last[name] / 1e12, speed)


def _noted(what: str, notes: list[str], last: dict[str, Any]) -> Callable[[str, Exception], None]:
    def failed(name: str, error: Exception) -> None:
        why = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        notes.append(f"{name} {what} were not measured: {why}")
        last.pop(name)

    return failed


def product(name: str, sizes: tuple[int, int, int], device: torch.device) -> Probe:
    """Return a product in a format, of matrices whose `sizes` are rows, depth and columns."""
    made: list[Callable[[], Any]] = []

    def run() -> None:
        if not made:  # in the first call, so that one which does not fit is told like one without a kernel
            made.append(_multiplication(name, sizes, device))
        with torch.no_grad():
            made[0]()

    return Probe(f"{name} product", run, lambda: _TF32(name == "tf32", device))


def time_padded(
    device: torch.device, name: str, sizes: tuple[int, int, int], padded: tuple[int, int, int], most_s: float
) -> tuple[list[float], list[float]]:
    """Return the seconds by round of a product with its own sizes and with padded ones."""
    probes = {"as it is": product(name, sizes, device), "padded": product(name, padded, device)}
    as_it_is, with_pads = time_probes(probes, device, most_s).values()
    return as_it_is, with_pads


def _multiplication(name: str, sizes: tuple[int, int, int], device: torch.device) -> Callable[[], Any]:
    rows, depth, columns = sizes
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    if name == "fp8":
        one = torch.ones((), device=device)
        left = matrix(rows, depth).to(torch.float8_e4m3fn)
        right = matrix(columns, depth).to(torch.float8_e4m3fn).t()
        return lambda: _aten.scaled_product(left, right, one, one)
    left, right = matrix(rows, depth).to(DTYPES[name]), matrix(columns, depth).to(DTYPES[name]).t()
    return lambda: left @ right


# -- convolutions ------------------------------------------------------------------------------------------------------


def convolutions(
    names: Sequence[str], sizes: Sequence[tuple[int, int, int]], device: torch.device, notes: list[str]
) -> Iterator[Convolution]:
    """Measure 3x3 convolutions of stride 1 and 2, forward and backward, small ones first, of all formats in turns.

    Args:
        names: Of formats, `"fp32"` among them.
        sizes: Rows, channels, and the side of an image, the smallest first. Of each format the largest one counts.
        device: Where.
        notes: Gets what could not be measured.

    """
    for stride in (1, 2):
        last: dict[str, Any] = dict.fromkeys(names, (0.0, 1))  # seconds of the slower part, and its work
        found: dict[tuple[str, Part], Convolution] = {}
        for rows, channels, side in sizes:
            work = rows * channels**2 * side**2
            fitting = [n for n, (seconds, of) in last.items() if seconds * work / of <= _CONVOLUTION_S]
            made = {name: _Convolved(name, (rows, channels, side), stride, device) for name in fitting}
            for part in ("forward", "backward"):
                probes = {name: Probe(f"{name} {part}", getattr(made[name], part)) for name in made if name in last}
                failed = _noted(f"convolutions (stride {stride}, {part})", notes, last)
                times = time_probes(probes, device, _CONVOLUTION_S, failed)
                for name, seconds in times.items():
                    last[name] = (max(median(seconds), last[name][0] if part == "backward" else 0.0), work)
                    speed = compare(seconds, times.get("fp32", ()), among=_CONVOLUTIONS)
                    if name != "fp32" and speed is not None:
                        found[name, part] = Convolution(name, part, stride, speed)
        yield from found.values()


@final
class _Convolved:
    """A convolution whose parts are timed one by one; it is made in its first call."""

    def __init__(self, name: str, size: tuple[int, int, int], stride: int, device: torch.device) -> None:
        self._dtype, self._size, self._stride, self._where = DTYPES[name], size, stride, device
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._out: torch.Tensor | None = None

    def forward(self) -> None:
        if self._made is None:
            rows, channels, side = self._size
            images = torch.ones(rows, channels, side, side, dtype=self._dtype, device=self._where, requires_grad=True)
            weight = torch.ones(channels, channels, 3, 3, dtype=self._dtype, device=self._where, requires_grad=True)
            self._made = images, weight
        with torch.enable_grad():
            self._out = conv2d(*self._made, stride=self._stride, padding=1)

    def backward(self) -> None:
        if self._made is None or self._out is None:
            self.forward()
        assert self._out is not None
        torch.autograd.grad(self._out, self._made or (), torch.ones_like(self._out), retain_graph=True)


@final
class _TF32:
    """Computes fp32 products in TF32, or in full precision."""

    def __init__(self, on: bool, device: torch.device) -> None:
        self._on, self._full = on, full_precision(device.type)

    def __enter__(self) -> None:
        if not self._on:
            self._full.__enter__()
            return
        self._switch = fp32_switches()[0]
        self._before = self._switch.fp32_precision
        self._switch.fp32_precision = "tf32"

    def __exit__(self, *error: Any) -> None:
        if not self._on:
            self._full.__exit__(*error)
        else:
            self._switch.fp32_precision = self._before
