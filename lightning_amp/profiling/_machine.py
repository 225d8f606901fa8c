"""What a machine can do: matrix products in every format, measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import final

from lightning_amp._compat import _aten
from lightning_amp._cpu_name import cpu_name
from lightning_amp.advice import Format, Machine, Product
from lightning_amp.casting import Choice, cpu_has, runnable
from lightning_amp.profiling._traps import known_traps
from lightning_amp.shadow import is_out_of_memory
from lightning_amp.tracing import fp32_switches, full_precision, reduces_fp32

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SIZES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "other": (128, 256, 512, 1024, 2048)}
_SHORT_SIZES = {"cuda": (512, 2048, 4096), "other": (256, 512, 1024)}
_MOST_S = 0.6
"""Seconds that the products of one size may take; where the next size would take longer it is left out."""
_MOST_RUNS = 20
_NEARLY_BEST = 0.75
_NATIVE_GAIN = 1.05
"""A format whose products are not even this much faster than those of fp32 gains nothing."""

_PACKAGES = ("torch", "lightning", "torchmetrics", "lightning_amp", "torchao", "triton")


def examine(device: torch.device, *, short: bool = False) -> Machine:
    """Measure a machine.

    Args:
        device: Where.
        short: Fewer sizes: some seconds.

    Cost: at most 20 s, memory of three matrices of 8192 x 8192 on a GPU.

    """
    notes = [*_busy(device)]
    products = list(_products(device, (_SHORT_SIZES if short else _SIZES), notes))
    best = {name: max((p.tflops for p in products if p.format == name), default=0.0) for name in FORMATS}
    formats = tuple(_format(name, device, products, best) for name in FORMATS if name != "tf32" or _has_tf32(device))
    choice, reason = Choice.pick(device)
    versions = installed()
    return Machine(
        device=device_name(device),
        device_type=device.type,
        memory_gib=_memory_bytes(device) / 2**30,
        versions=versions,
        formats=formats,
        products=tuple(products),
        tf32=_tf32(device),
        precision=choice.name,
        precision_reason=reason,
        traps=known_traps(versions, device.type),
        notes=tuple(notes),
    )


def _busy(device: torch.device) -> Iterator[str]:
    """Say so where others compute on the same CPUs."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device.type == "cpu" and load > cores:
        yield f"the machine is busy (load {load:.1f} on {cores} cores), so that all figures are noisy"


def installed() -> dict[str, str]:
    """Return the versions of what matters here, with that of Python."""
    found = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _PACKAGES[1:]:
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """Return what a person calls it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if device.type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    return device.type


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


# -- formats -----------------------------------------------------------------------------------------------------------


def _format(name: str, device: torch.device, products: Sequence[Product], best: dict[str, float]) -> Format:
    support, reason = support_of(name, device)
    own = [product for product in products if product.format == name]
    if support == "native" and name not in ("fp32", "tf32") and own and best[name] < _NATIVE_GAIN * best["fp32"]:
        reason += ", but its products are no faster than those of fp32"
    fills = next((product.size for product in own if product.tflops >= _NEARLY_BEST * best[name]), 0)
    return Format(name, support, reason, best[name], fills)


def support_of(name: str, device: torch.device) -> tuple[str, str]:
    """Return whether a format is `"native"`, `"emulated"` or `"missing"`, and why, in a few words."""
    if name in ("fp32", "tf32"):
        return "native", ""
    if name not in runnable(device):
        what = "torch's autocast does not run it here" if name != "fp8" else "no matrix units for it"
        return "missing", what
    if device.type == "cuda":
        return _on_cuda(name, device)
    if device.type == "cpu":
        return _on_cpu(name)
    return "native", "as torch says"


def _on_cuda(name: str, device: torch.device) -> tuple[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    if name == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "emulated", f"sm_{major}{minor} has no bf16 matrix units, although torch says that it is supported"
    if name == "fp16" and major < 7:
        return "emulated", f"sm_{major}{minor} has no fp16 matrix units"
    return "native", "matrix units"


def _on_cpu(name: str) -> tuple[str, str]:
    found = cpu_has(name)
    if found:
        return "native", ", ".join(found)
    return "emulated", f"this CPU has no instructions for {name}"


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def _tf32(device: torch.device) -> str:
    on = reduces_fp32(device.type)
    if device.type == "cpu":
        return "on: fp32 products may be computed in bf16 (`set_float32_matmul_precision`)" if on else ""
    if not _has_tf32(device):
        return ""
    return "on: fp32 products are computed in TF32" if on else "off: fp32 products are computed in full precision"


# -- products ----------------------------------------------------------------------------------------------------------


def _products(device: torch.device, sizes: dict[str, tuple[int, ...]], notes: list[str]) -> Iterator[Product]:
    for name in FORMATS:
        if (name == "tf32" and not _has_tf32(device)) or support_of(name, device)[0] == "missing":
            continue
        last = 0.0
        for size in sizes.get(device.type, sizes["other"]):
            if 8 * last > _MOST_S:  # the next takes eight times as long
                break
            try:
                last = matmul_s(name, (size, size, size), device)
            except Exception as error:
                what = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
                notes.append(f"{name} products of {size} were not measured: {what}")
                break
            yield Product(name, size, 2 * size**3 / last / 1e12)


def matmul_s(name: str, sizes: tuple[int, int, int], device: torch.device, *, most_s: float = _MOST_S) -> float:
    """Return the seconds of one matrix product, the best of several.

    Args:
        name: Of the format, as in :data:`FORMATS`.
        sizes: Rows, depth, columns.
        device: Where.
        most_s: How long the runs may take all together; one is always done.

    """
    multiply = _multiplication(name, sizes, device)
    with torch.no_grad(), _TF32(name == "tf32", device):
        return timed_s(multiply, device, most_s=most_s)


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


def timed_s(run: Callable[[], Any], device: torch.device, *, most_s: float = _MOST_S) -> float:
    """Return the seconds of a call, the best of several; on a device by its own clock.

    The best, since what else the machine does can only make it slower.
    """
    run()  # kernels are chosen and memory is allocated
    times: list[float] = []
    began = time.perf_counter()
    if device.type != "cuda":
        first = True
        while first or (len(times) < _MOST_RUNS and time.perf_counter() - began < most_s):
            first = False
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)
    torch.cuda.synchronize(device)
    for _ in range(_MOST_RUNS):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        times.append(start_event.elapsed_time(end_event) / 1e3)
        if time.perf_counter() - began > most_s:
            break
    return min(times)


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
