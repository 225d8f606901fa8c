"""The precisions to compare, and the Trainer arguments of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins import MixedPrecision
from typing_extensions import final


@final
class Arm(NamedTuple):
    """One precision.

    Attributes:
        name: Its name on the command line and in the file of records.
        title: Its name on the page.
        format: The number format of the matrix products.
        stock: Lightning's own arm with the same format, for the ratio on the page; empty if there is none.

    """

    name: str
    title: str
    format: str
    stock: str = ""

    def trainer_kwargs(self, device_type: str, *, tiny: bool) -> dict[str, Any]:
        """Return the Trainer arguments; at toy sizes fp8 is emulated."""
        if self.name in ("fp32", "tf32"):
            return {"precision": "32-true"}
        if self.name == "lightning_fp16" and device_type == "cpu":  # there `precision="16-mixed"` becomes bf16
            return {"plugins": [MixedPrecision("16-mixed", device_type)]}
        if self.name.startswith("lightning_"):
            return {"precision": {"bf16": "bf16-mixed", "fp16": "16-mixed"}[self.format]}
        from lightning_amp import AmpPrecision

        if self.name == "fp8" and tiny:
            from torchao.float8 import Float8LinearConfig

            recipe = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
            return {"plugins": [AmpPrecision("fp8", fp8_recipe=recipe)]}
        return {"plugins": [AmpPrecision(self.name)]}

    def set_fp32(self) -> None:
        """Set the format of float32 products and convolutions: TF32, except in the strict arm."""
        torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = self.name != "fp32"


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("fp32", "fp32, strict", "fp32"),
        Arm("tf32", "fp32 with TF32", "tf32"),
        Arm("lightning_bf16", "Lightning's bf16", "bf16"),
        Arm("bf16", "our bf16", "bf16", "lightning_bf16"),
        Arm("lightning_fp16", "Lightning's fp16", "fp16"),
        Arm("fp16", "our fp16", "fp16", "lightning_fp16"),
        Arm("fp8", "our fp8", "fp8", "lightning_bf16"),
    )
}
"""The arms in the order of their runs, so that the two sides of a ratio are close in time."""

_DENSE_TFLOPS = {
    "H200 NVL": (60.3, 417.5, 835.5, 835.5, 1671.0),
    "H200": (66.9, 494.7, 989.4, 989.4, 1978.9),
    "H100 80GB HBM3": (66.9, 494.7, 989.4, 989.4, 1978.9),
    "A100": (19.5, 156.0, 312.0, 312.0, 0.0),
}
"""Peaks in fp32, TF32, bf16, fp16 and fp8 without sparsity, from the vendor's data sheets; the first that fits."""


def peak_flops(device_name: str, arm: Arm) -> float | None:
    """Return the peak FLOPs per second of a device in the format of an arm; `None` if unknown."""
    row = next((row for name, row in _DENSE_TFLOPS.items() if name in device_name), None)
    if row is None:
        return None
    return row[("fp32", "tf32", "bf16", "fp16", "fp8").index(arm.format)] * 1e12 or None
