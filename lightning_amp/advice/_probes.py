"""Time matrix products and convolutions in several formats, in rounds. Each round runs every one of them once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import conv2d
from typing_extensions import final

from lightning_amp.advice import _aten
from lightning_amp.advice._gains import compare
from lightning_amp.advice._machine import Convolution, Part, Product
from lightning_amp.measure import DeviceClock, in_rounds
from lightning_amp.shadow import is_out_of_memory
from lightning_amp.tracing import fp32_switches, full_precision

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ROUNDS = (3, 9)
"""The least and the largest number of rounds."""
_MOST_CALLS = 5
"""Calls of a probe in one round, of which the median counts."""
_PRODUCT_S, _CONVOLUTION_S = 0.6, 0.2
"""Seconds for one size in one format. A size is left out if the smaller one shows that it would take longer."""

_CONVOLUTIONS = 4
"""Number of convolutions of one format: two strides, forward and backward each. A finding names the slowest of them."""


@final
class Probe(NamedTuple):
    """A call to time, named by its format and its kind, and the context manager in which it runs."""

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

    A probe whose first call takes longer than `most_s`, the seconds for each probe, runs in one round only. `failed` is
    called with the name and the exception if a probe raises; without `failed` the exception is raised.
    """
    timed = {name: _TimedProbe(probe, device, most_s) for name, probe in probes.items()}
    return in_rounds(timed, lambda number: [name for name, one in timed.items() if one.takes_part(number)], failed)


@final
@dataclass
class _TimedProbe:
    """A probe that adds up the seconds it has used."""

    probe: Probe
    device: torch.device
    most_s: float
    first_s: float = 0.0
    used_s: float = 0.0
    num_calls: int = 1

    def __call__(self) -> float:
        times = [call_s(self.probe, self.device) for _ in range(self.num_calls)]
        if not self.used_s:
            self.first_s = times[0]
            self.num_calls = max(1, min(_MOST_CALLS, int(self.most_s / _ROUNDS[1] / max(times[0], 1e-9))))
        self.used_s += sum(times)
        return median(times)

    def takes_part(self, number: int) -> bool:
        least = 1 if self.first_s > self.most_s else _ROUNDS[0]
        return number < least or (number < _ROUNDS[1] and self.used_s <= self.most_s)


def call_s(probe: Probe, device: torch.device) -> float:
    """Return the seconds of one call of a probe."""
    with probe.settings():
        return DeviceClock(device).seconds_of(probe.run)


# -- products ----------------------------------------------------------------------------------------------------------


def products(names: Sequence[str], sizes: Sequence[int], device: torch.device, notes: list[str]) -> Iterator[Product]:
    """Measure square matrix products of all formats in turns, and compare them with `"fp32"`.

    `sizes` begin with the smallest. `notes` gets a note for each measurement that failed.
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
    """Return a probe of a product in a format, of matrices whose `sizes` are rows, depth and columns."""
    made: list[Callable[[], Any]] = []

    def run() -> None:
        if not made:  # allocated in the first call, because its exceptions are reported
            made.append(_multiplication(name, sizes, device))
        with torch.no_grad():
            made[0]()

    return Probe(f"{name} product", run, _in_tf32 if name == "tf32" else partial(full_precision, device.type))


@contextmanager
def _in_tf32() -> Generator[None]:
    """Compute fp32 products in TF32."""
    switch = fp32_switches()[0]
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        switch.fp32_precision = before


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
    """Measure 3x3 convolutions of stride 1 and 2, forward and backward, of all formats in turns.

    `sizes` are rows, channels, and the side of an image. They begin with the smallest, and the largest one of each
    format counts. `notes` gets a note for each measurement that failed.
    """
    for stride in (1, 2):
        # seconds and amount of work of the slower part, at the last size
        last: dict[str, Any] = dict.fromkeys(names, (0.0, 1))
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
    """A convolution whose forward and backward are timed separately; its first call allocates the tensors."""

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
