"""Measure a machine: matrix products in every format, the support for each format, and the installed versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from packaging.specifiers import SpecifierSet
from typing_extensions import final

from lightning_amp._compat import _names
from lightning_amp._cpu_name import cpu_name
from lightning_amp._text import counted
from lightning_amp.casting import Choice, cpu_has, has_bf16_units, runnable
from lightning_amp.measure import DeviceClock, SpeedComparison, in_rounds
from lightning_amp.tracing import fp32_switches, full_precision, reduces_fp32

Support = Literal["native", "emulated", "missing"]
Sizes = tuple[int, int, int]

_scaled_product = torch.ops.aten._scaled_mm
"""Multiplies matrices in fp8. Remove when torch 2.10, whose `scaled_mm` is public, is the oldest."""

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "other": (128, 256, 512, 1024, 2048)}
_SHORT_SIZES = {"cuda": (512, 2048, 4096), "other": (256, 512, 1024)}
_ROUNDS = 9
_PRODUCT_S = 0.6
"""Seconds for one size in one format. A size is left out if the smaller one shows that it would take longer."""

_TRAPS = (
    ("cuda", ">=2.12", "`rms_norm` in fp32 even if its input and weight are bf16", 188955),
    ("cpu", ">=2.13,<2.14", "dilated and grouped convolutions in bf16 4 to 16 times as slow as torch 2.12", 183815),
)
"""Slow operations of some versions of torch: type of device, versions, the operation, and torch's issue."""


@final
@dataclass(frozen=True)
class Product:
    """The speed of matrix products of one size in one format.

    Attributes:
        size: Rows, columns and depth.
        tflops: 10^12 floating-point operations per second, from the shortest time.
        speed: The speed relative to fp32 in the same rounds; `None` if fp32 did not run.

    """

    format: str
    size: int
    tflops: float
    speed: SpeedComparison | None = None


@final
@dataclass(frozen=True)
class Format:
    """How a machine supports a format, and why, in a few words: the instructions, or why there are none."""

    name: str
    support: Support
    reason: str


@final
@dataclass(frozen=True)
class Machine:
    """The measurements of a machine.

    Attributes:
        device: Its name.
        memory_gib: Memory of the device; 0 if unknown.
        versions: Installed versions by package.
        tf32: Whether fp32 products may be computed in TF32 (on a CPU: in bf16); `None` where there is no such switch.
        precision: The choice of `"auto"` here.
        traps: Operations that the installed torch is known to compute slowly.
        notes: Measurements that failed, and why.

    """

    device: str
    device_type: str
    memory_gib: float
    versions: Mapping[str, str]
    formats: tuple[Format, ...]
    products: tuple[Product, ...]
    tf32: bool | None
    precision: str
    precision_reason: str
    traps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def format(self, name: str) -> Format | None:
        """Return a format by its name."""
        return next((found for found in self.formats if found.name == name), None)

    def product(self, name: str) -> Product | None:
        """Return the product by which a format is judged: the largest of the ones that ran the most rounds."""
        own = [(p.speed.num_repetitions, p.size, p) for p in self.products if p.format == name and p.speed is not None]
        return max(own, default=(0, 0, None), key=lambda found: found[:2])[2]

    def speed(self, name: str) -> SpeedComparison | None:
        """Return the speed of matrix products of a format relative to fp32; `None` if it was not measured."""
        product = self.product(name)
        return None if product is None else product.speed

    def best_tflops(self, name: str) -> float:
        """Return the highest rate of a format; 0 if none was measured."""
        return max((product.tflops for product in self.products if product.format == name), default=0.0)


def examine(device: torch.device, *, short: bool = False) -> Machine:
    """Measure a machine. `short` leaves out sizes, so that the measurement takes only a few seconds.

    Cost: at most 20 s, memory of three matrices of 8192 x 8192 on a GPU.

    """
    notes: list[str] = []
    has_tf32 = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
    names = ("fp32", *(["tf32"] if has_tf32 else []), "bf16", "fp16", "fp8")
    formats = tuple(Format(name, *support_of(name, device)) for name in names)
    sizes = (_SHORT_SIZES if short else _SIZES)["cuda" if device.type == "cuda" else "other"]
    choice, reason = Choice.pick(device)
    return Machine(
        device=device_name(device),
        device_type=device.type,
        memory_gib=_memory_bytes(device) / 2**30,
        versions=installed(),
        formats=formats,
        products=tuple(_products([f.name for f in formats if f.support != "missing"], sizes, device, notes)),
        tf32=reduces_fp32(device.type) if has_tf32 or device.type == "cpu" else None,
        precision=choice.name,
        precision_reason=reason,
        traps=tuple(_traps(device.type)),
        notes=tuple(notes),
    )


def _products(names: Sequence[str], sizes: Sequence[int], device: torch.device, notes: list[str]) -> Iterator[Product]:
    """Measure square products of all formats in turns, the smallest first, and compare them with `"fp32"`."""
    last = dict.fromkeys(names, 0.0)

    def failed(name: str, error: Exception) -> None:
        notes.append(f"{name} products of {size} were not measured: {type(error).__name__}: {error}".partition("\n")[0])
        last.pop(name)

    for size in sizes:
        calls = {name: product_of(name, (size, size, size), device) for name in last if 8 * last[name] <= _PRODUCT_S}
        found = timed(calls, _PRODUCT_S, failed)
        for name, seconds in found.items():
            last[name] = min(seconds)  # other work on the machine makes a product slower, never faster
            speed = compare(seconds, found.get("fp32", ())) if name != "fp32" else None
            yield Product(name, size, 2 * size**3 / last[name] / 1e12, speed)


def timed(
    calls: Mapping[str, Callable[[], float]], most_s: float, failed: Callable[[str, Exception], None] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of each call by round; a call stops when it has used `most_s`, after one round at least."""
    used = dict.fromkeys(calls, 0.0)

    def run(name: str) -> float:
        seconds = calls[name]()
        used[name] += seconds
        return seconds

    def takes_part(number: int) -> list[str]:
        return [name for name in calls if number < _ROUNDS and (not number or used[name] <= most_s)]

    return in_rounds({name: lambda name=name: run(name) for name in calls}, takes_part, failed)


def product_of(name: str, sizes: Sizes, device: torch.device) -> Callable[[], float]:
    """Return a function that multiplies matrices of a format once, and returns the seconds.

    `sizes` are rows, depth and columns. The first call allocates the matrices, because its exceptions are reported.
    """
    made: list[Callable[[], Any]] = []

    def run() -> float:
        made.extend([] if made else [_multiplication(name, sizes, device)])
        with torch.no_grad(), _in_tf32() if name == "tf32" else full_precision(device.type):
            return DeviceClock(device).seconds_of(made[0])

    return run


def _multiplication(name: str, sizes: Sizes, device: torch.device) -> Callable[[], Any]:
    rows, depth, columns = sizes
    generator = torch.Generator(device).manual_seed(0)
    shapes = (rows, depth), (columns, depth)
    left, right = (torch.randn(*shape, device=device, generator=generator) for shape in shapes)
    if name == "fp8":
        one = torch.ones((), device=device)
        left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        return lambda: _scaled_product(left, right, one, one, out_dtype=torch.bfloat16)
    left, right = left.to(_DTYPES[name]), right.to(_DTYPES[name]).t()
    return lambda: left @ right


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


def compare(contestant_s: Sequence[float], reference_s: Sequence[float]) -> SpeedComparison | None:
    """Compare two series of seconds, paired by round; `None` if they have no round in common.

    A race is judged twice, after its first rounds and at its end, so the chance of a wrong claim is 1 % at most.
    """
    return SpeedComparison.of_rounds(contestant_s, reference_s, 0.995)


# -- facts -------------------------------------------------------------------------------------------------------------


def support_of(name: str, device: torch.device) -> tuple[Support, str]:
    """Return whether a format is `"native"`, `"emulated"` or `"missing"`, and why, in a few words."""
    if name in ("fp32", "tf32"):
        return "native", ""
    if name not in runnable(device):
        return "missing", "torch's autocast does not run it here" if name != "fp8" else "no matrix units for it"
    if device.type == "cpu":
        found = cpu_has(name)
        return ("native", ", ".join(found)) if found else ("emulated", f"this CPU has no instructions for {name}")
    if device.type != "cuda":
        return "native", "as torch says"
    major, minor = torch.cuda.get_device_capability(device)
    if (name == "bf16" and not has_bf16_units(device)) or (name == "fp16" and major < 7):
        return "emulated", f"sm_{major}{minor} has no {name} matrix units, whatever torch says"
    return "native", "matrix units"


def device_name(device: torch.device) -> str:
    """Return the name of a device as its vendor writes it, with its compute capability or its number of threads."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    return f"{cpu_name()}, {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else device.type


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for name in (_names.kind(), "torchmetrics", "lightning_amp", "torchao", "triton"):
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _traps(device_type: str) -> Iterator[str]:
    version = str(torch.__version__).partition("+")[0]
    for where, specifier, text, issue in _TRAPS:
        if where == device_type and SpecifierSet(specifier, prereleases=True).contains(version):
            yield f"torch {version} computes {text} (https://github.com/pytorch/pytorch/issues/{issue})"
