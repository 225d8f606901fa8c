"""`tf32-off`: products that stay in fp32 could be computed in TF32."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._machine import Machine
from lightning_amp.advice.findings._finding import Finding


def tf32_off(machine: Machine) -> Iterator[Finding]:
    """Yield it where there is TF32, and both were measured."""
    tf32, full = machine.format("tf32"), machine.format("fp32")
    if tf32 is None or full is None or not full.tflops or machine.tf32 != "off":
        return
    text = (
        f"TF32 is off: fp32 products reach {rounded(full.tflops)} TFLOP/s, and {rounded(tf32.tflops)} with TF32."
        " Products that stay in fp32 beside mixed precision are computed in full."
    )
    action = '`torch.set_float32_matmul_precision("high")` turns it on; it rounds the inputs of products to 10 bits.'
    yield Finding("note", "tf32-off", text, action)
