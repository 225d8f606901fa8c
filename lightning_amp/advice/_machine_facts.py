"""What was measured of a machine, as data: everything that is said follows from it, and JSON holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import final


@final
@dataclass(frozen=True)
class Product:
    """How fast matrix products of one size are.

    Attributes:
        format: `"fp32"`, `"tf32"`, `"bf16"`, `"fp16"` or `"fp8"`.
        size: Rows, columns and depth.
        tflops: 10^12 floating-point operations per second.

    """

    format: str
    size: int
    tflops: float


@final
@dataclass(frozen=True)
class Format:
    """What a machine makes of a format.

    Attributes:
        name: As of :class:`Product`.
        support: `"native"`, `"emulated"` or `"missing"`.
        reason: Why, in a few words.
        tflops: The best of its products; 0 if none was measured.
        fills_at: The smallest size whose products reach three quarters of the best; 0 if none was measured.

    """

    name: str
    support: str
    reason: str
    tflops: float = 0.0
    fills_at: int = 0


@final
@dataclass(frozen=True)
class Trap:
    """A fault of a version that is installed.

    Attributes:
        package: Whose.
        version: Which one is here.
        text: What goes wrong, and what to do.
        source: Where that is known from.
        concerns: What a module has to have: `"convolutions"`, `"torch.compile"`, `"FSDP2"`, `"fp8"`; empty: nothing.

    """

    package: str
    version: str
    text: str
    source: str
    concerns: str = ""


@final
@dataclass(frozen=True)
class Machine:
    """What a machine can do.

    Attributes:
        device: Its name.
        device_type: `"cpu"`, `"cuda"`, ...
        memory_gib: Of the device; 0 if that is not known.
        versions: By package.
        formats: What it makes of each format.
        products: What was measured.
        tf32: Whether fp32 products may be computed in TF32 now, in words; empty where there is no TF32.
        precision: What `"auto"` picks here.
        precision_reason: Why.
        traps: Of the versions that are installed.
        notes: What could not be measured, and why.

    """

    device: str
    device_type: str
    memory_gib: float
    versions: Mapping[str, str]
    formats: tuple[Format, ...]
    products: tuple[Product, ...]
    tf32: str
    precision: str
    precision_reason: str
    traps: tuple[Trap, ...] = ()
    notes: tuple[str, ...] = ()

    def format(self, name: str) -> Format | None:
        """Return a format by its name."""
        return next((found for found in self.formats if found.name == name), None)

    def gain(self, name: str) -> float:
        """Return how many times as fast as in fp32 products are at best; 0 if that is not known."""
        half, full = self.format(name), self.format("fp32")
        return half.tflops / full.tflops if half and full and full.tflops else 0.0
