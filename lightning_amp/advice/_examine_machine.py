"""Measure a machine: matrix products and convolutions in every format, and the support for each format."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence

import torch

from lightning_amp._cpu_name import cpu_name
from lightning_amp.advice._machine import Convolution, Format, Machine, Product, Support, Switch, judged
from lightning_amp.advice._probes import DTYPES, convolutions, products
from lightning_amp.advice.findings import known_traps
from lightning_amp.casting import Choice, cpu_has, has_bf16_units, runnable
from lightning_amp.tracing import reduces_fp32

_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_SIZES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "other": (128, 256, 512, 1024, 2048)}
_SHORT_SIZES = {"cuda": (512, 2048, 4096), "other": (256, 512, 1024)}
_IMAGES = {"cuda": ((8, 64, 56), (32, 256, 56)), "other": ((4, 32, 28), (8, 64, 56))}
"""Rows, channels, and the side of images."""
_NEARLY_BEST = 0.75


def examine(device: torch.device, *, short: bool = False) -> Machine:
    """Measure a machine. `short` leaves out sizes, so that the measurement takes only a few seconds.

    Cost: at most 20 s, memory of three matrices of 8192 x 8192 on a GPU.

    """
    notes: list[str] = []
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device.type == "cpu" and load > cores:
        notes.append(f"the machine is busy (load {load:.1f} on {cores} cores), so that all figures are noisy")
    shown = [name for name in _FORMATS if name != "tf32" or _has_tf32(device)]
    names = [name for name in shown if support_of(name, device)[0] != "missing"]
    kind = device.type if device.type in _SIZES else "other"
    measured = list(products(names, (_SHORT_SIZES if short else _SIZES)[kind], device, notes))
    images = _IMAGES[kind][: 1 if short and kind == "other" else None]
    convolved = list(convolutions([n for n in names if n in DTYPES and n != "tf32"], images, device, notes))
    formats = tuple(_format(name, device, measured, [c for c in convolved if c.format == name]) for name in shown)
    choice, reason = Choice.pick(device)
    versions = installed()
    return Machine(
        device=device_name(device),
        device_type=device.type,
        memory_gib=_memory_bytes(device) / 2**30,
        versions=versions,
        formats=formats,
        products=tuple(measured),
        tf32=_tf32(device),
        precision=choice.name,
        precision_reason=reason,
        traps=known_traps(versions, device.type),
        notes=tuple(notes),
        convolutions=tuple(convolved),
    )


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("lightning", "torchmetrics", "lightning_amp", "torchao", "triton"):
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a device as its vendor writes it, with its compute capability or its number of threads."""
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


def _format(
    name: str, device: torch.device, products: Sequence[Product], convolutions: Sequence[Convolution]
) -> Format:
    support, reason = support_of(name, device)
    own = [product for product in products if product.format == name]
    best = max((product.tflops for product in own), default=0.0)
    fills = next((product.size for product in own if product.tflops >= _NEARLY_BEST * best), 0)
    if support == "native" and name != "fp32":
        product = judged(own)
        slower = ["matrix products"] if product is not None and _is_slower(product) else []
        slower += ["some 3x3 convolutions"] if any(map(_is_slower, convolutions)) else []
        if slower:
            support, reason = "partial", f"{reason}, but {' and '.join(slower)} are slower than in fp32"
    return Format(name, support, reason, best, fills)


def _is_slower(one: Product | Convolution) -> bool:
    return one.speed is not None and one.speed.claim == "slower"


def support_of(name: str, device: torch.device) -> tuple[Support, str]:
    """Return whether a format is `"native"`, `"emulated"` or `"missing"`, and why, in a few words."""
    if name in ("fp32", "tf32"):
        return "native", ""
    if name not in runnable(device):
        what = "torch's autocast does not run it here" if name != "fp8" else "no matrix units for it"
        return "missing", what
    if device.type == "cpu":
        found = cpu_has(name)
        return ("native", ", ".join(found)) if found else ("emulated", f"this CPU has no instructions for {name}")
    if device.type != "cuda":
        return "native", "as torch says"
    major, minor = torch.cuda.get_device_capability(device)
    if name == "bf16" and not has_bf16_units(device):
        return "emulated", f"sm_{major}{minor} has no bf16 matrix units, although torch says that it is supported"
    if name == "fp16" and major < 7:
        return "emulated", f"sm_{major}{minor} has no fp16 matrix units"
    return "native", "matrix units"


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def _tf32(device: torch.device) -> Switch:
    on = reduces_fp32(device.type)
    if device.type == "cpu":
        return "on" if on else ""
    if not _has_tf32(device):
        return ""
    return "on" if on else "off"
