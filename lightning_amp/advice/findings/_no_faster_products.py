"""`no-faster-products`: a format has instructions, and its matrix products gain nothing. Of the machine alone."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_amp._text import rounded
from lightning_amp.advice._decision import FP32, Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice.findings._finding import Finding
from lightning_amp.advice.findings._words import in_fp32, recommendation


def no_faster_products(machine: Machine, decision: Decision) -> Iterator[Finding]:
    """Yield it for the format that is looked at; beside a step, `_not_faster.py` says it with what the step gains."""
    chosen, product = machine.format(decision.looked_at), machine.compared_product(decision.looked_at)
    if chosen is None or product is None or product.speed is None or decision.looked_at == FP32:
        return
    if chosen.support not in ("native", "partial") or product.speed.claim not in ("slower", "same"):
        return
    text = (
        f"Matrix products in {decision.looked_at} of {product.size} rows and columns reach"
        f" {rounded(product.tflops)} TFLOP/s ({in_fp32(product.speed)}): they gain no speed here."
    )
    action = recommendation(decision) if decision.advises_against else ""
    yield Finding("warning", "no-faster-products", text, action, 0.9)
