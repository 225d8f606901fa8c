"""The measurements of a machine, as data. Findings and pages are made from them, and JSON holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

from lightning_amp.measure import SpeedComparison

Support = Literal["native", "partial", "emulated", "missing"]
Part = Literal["forward", "backward"]
Concern = Literal["", "convolutions", "torch.compile", "FSDP2", "fp8"]
"""What a module has to have for a fault of a version to matter; empty: nothing."""
Switch = Literal["on", "off", ""]


@final
@dataclass(frozen=True)
class Product:
    """How fast matrix products of one size are.

    Attributes:
        format: `"fp32"`, `"tf32"`, `"bf16"`, `"fp16"` or `"fp8"`.
        size: Rows, columns and depth.
        tflops: 10^12 floating-point operations per second, from the median time.
        speed: Against products of this size in fp32, which ran in the same rounds; `None` if they did not.

    """

    format: str
    size: int
    tflops: float
    speed: SpeedComparison | None = None


def judged(products: Iterable[Product]) -> Product | None:
    """Return the product that tells most about a format: of those that ran in the most rounds the largest."""
    compared = [(p.speed.num_repetitions, p.size, p) for p in products if p.speed is not None]
    return max(compared, default=(0, 0, None), key=lambda found: found[:2])[2]


@final
@dataclass(frozen=True)
class Convolution:
    """How fast a 3x3 convolution is, against the same one in fp32, which ran in the same rounds.

    Attributes:
        stride: 1 or 2.

    """

    format: str
    part: Part
    stride: int
    speed: SpeedComparison


@final
@dataclass(frozen=True)
class Format:
    """What a machine makes of a format.

    Attributes:
        support: `"native"`: there are instructions for it, and neither products nor convolutions are measured to be
            slower than in fp32. `"partial"`: there are instructions, and one of them is slower. `"emulated"`: there are
            no instructions. `"missing"`: it does not run.
        reason: The instructions, what is slower, or why there are none, in a few words.
        tflops: The best of its products; 0 if none was measured.
        fills_at: The smallest size whose products reach three quarters of the best; 0 if none was measured.

    """

    name: str
    support: Support
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
        concerns: Which modules.

    """

    package: str
    version: str
    text: str
    source: str
    concerns: Concern = ""


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
        products: What was measured of matrix products.
        tf32: Whether fp32 products may be computed in TF32 now, on a CPU in bf16; empty where there is no such switch.
        precision: What `"auto"` picks here.
        precision_reason: Why.
        traps: Of the versions that are installed.
        notes: What could not be measured, and why.
        convolutions: What was measured of convolutions.

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
        """Return the product of a format by which its speed is judged; `None` if none was compared with fp32."""
        return judged(product for product in self.products if product.format == name)

    def speed(self, name: str) -> SpeedComparison | None:
        """Return how fast matrix products of a format are, against fp32; `None` if that was not measured."""
        product = self.compared_product(name)
        return None if product is None else product.speed

    def slowest_convolution(self, name: str) -> Convolution | None:
        """Return the convolution that is slower than in fp32 by the largest ratio; `None` if none is."""
        slower = [c for c in self.convolutions if c.format == name and c.speed.claim == "slower"]
        return min(slower, key=lambda convolution: convolution.speed.ratio, default=None)
