"""The measurements of a machine, as data for findings, pages and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

from lightning_amp.measure import SpeedComparison

Support = Literal["native", "partial", "emulated", "missing"]
Part = Literal["forward", "backward"]
Concern = Literal["", "convolutions", "torch.compile", "FSDP2", "fp8"]
"""The feature that a module must use for a fault of a version to matter; empty: none."""
Switch = Literal["on", "off", ""]


@final
@dataclass(frozen=True)
class Product:
    """The speed of matrix products of one size in one format.

    Attributes:
        size: Rows, columns and depth.
        tflops: 10^12 floating-point operations per second, from the median time.
        speed: The speed relative to fp32 in the same rounds; `None` if fp32 did not run.

    """

    format: str
    size: int
    tflops: float
    speed: SpeedComparison | None = None


def judged(products: Iterable[Product]) -> Product | None:
    """Return the product by which a format is judged: the largest of the products that ran the most rounds."""
    compared = [(p.speed.num_repetitions, p.size, p) for p in products if p.speed is not None]
    return max(compared, default=(0, 0, None), key=lambda found: found[:2])[2]


@final
@dataclass(frozen=True)
class Convolution:
    """The speed of a 3x3 convolution relative to fp32 in the same rounds."""

    format: str
    part: Part
    stride: int
    speed: SpeedComparison


@final
@dataclass(frozen=True)
class Format:
    """How a machine supports a format.

    Attributes:
        support: `"native"`: it has instructions, and neither products nor convolutions are measured to be slower than
            in fp32. `"partial"`: it has instructions, but one of them is slower. `"emulated"`: it has no instructions.
            `"missing"`: it does not run.
        reason: A few words: the instructions, the slower operation, or the reason why there are no instructions.
        tflops: The highest rate of its products; 0 if none was measured.
        fills_at: The smallest size whose products reach three quarters of that rate; 0 if none was measured.

    """

    name: str
    support: Support
    reason: str
    tflops: float = 0.0
    fills_at: int = 0


@final
@dataclass(frozen=True)
class Trap:
    """A fault of an installed version: a text with the fault and its remedy, and its source."""

    package: str
    version: str
    text: str
    source: str
    concerns: Concern = ""


@final
@dataclass(frozen=True)
class Machine:
    """The measurements of a machine.

    Attributes:
        device: Its name.
        memory_gib: Memory of the device; 0 if unknown.
        versions: Installed versions by package.
        tf32: Whether fp32 products may be computed in TF32 (on a CPU: in bf16); empty where there is no such switch.
        precision: The choice of `"auto"` here.
        notes: Measurements that failed, and why.

    """

    device: str
    device_type: str
    memory_gib: float
    versions: Mapping[str, str]
    formats: tuple[Format, ...]
    products: tuple[Product, ...]
    tf32: Switch
    precision: str
    precision_reason: str
    traps: tuple[Trap, ...] = ()
    notes: tuple[str, ...] = ()
    convolutions: tuple[Convolution, ...] = ()

    def format(self, name: str) -> Format | None:
        """Return a format by its name."""
        return next((found for found in self.formats if found.name == name), None)

    def compared_product(self, name: str) -> Product | None:
        """Return the product by which a format is judged; `None` if none was compared with fp32."""
        return judged(product for product in self.products if product.format == name)

    def speed(self, name: str) -> SpeedComparison | None:
        """Return the speed of matrix products of a format relative to fp32; `None` if it was not measured."""
        product = self.compared_product(name)
        return None if product is None else product.speed

    def slowest_convolution(self, name: str) -> Convolution | None:
        """Return the convolution that is slowest compared with fp32; `None` if none is slower."""
        slower = [c for c in self.convolutions if c.format == name and c.speed.claim == "slower"]
        return min(slower, key=lambda convolution: convolution.speed.ratio, default=None)
