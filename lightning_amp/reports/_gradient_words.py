"""Write the sentences of `GradientMonitor`: what a gradient loses, where, and what helps."""

from __future__ import annotations

import math

from lightning_amp._text import exact, literal, percent, rounded
from lightning_amp.findings import (
    GradientRow,
    GradientSample,
    InaccurateDerivative,
    LostPrecision,
    TriedRemedy,
    bits_kept,
    describe_tried,
)


def describe_gradient(sample: GradientSample, scale: float | None, found: LostPrecision | TriedRemedy | None) -> str:
    """Describe a sample: what is lost, where, and what helps; or how well it fits.

    `scale` is the loss scale at which all gradients so far fit into fp16, and `found` what was tried.
    """
    total, bad = sample.rows[-1], sample.bad()
    if total.largest == 0:
        return f"GradientMonitor, step {total.step}: all gradients are zero."
    if not bad:
        return f"GradientMonitor, step {total.step}: {_healthy(sample, scale)}"
    at = f"loss scale {exact(total.scale)}" if total.precision == "fp16" else total.precision
    lines = [f"GradientMonitor, step {total.step}, {at}: {_what(sample, bad[0])}"]
    names = [f"`{row.name}`{_share(row)}" for row in bad if row is not total]
    if names and sample.forward_is_finite:
        more = f", and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"  {', '.join(names[:4])}{more}")
    if sample.clipped and not math.isnan(total.largest):
        lines.append("  fix: `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it (not tried)")
    elif isinstance(found, TriedRemedy):
        lines.append(f"  {describe_tried((found,))}")
    elif found is not None:
        lines.append(f"  {found}")
    return "\n".join(lines)


def _what(sample: GradientSample, first: GradientRow) -> str:
    total = sample.rows[-1]
    if not math.isfinite(total.largest):
        what = "NaN" if math.isnan(total.largest) else "infinite"
        return f"the gradient is {what} in fp32 too: no precision and no loss scale helps"
    if sample.clipped:
        return f"{sample.clipped} clips the gradient while it is multiplied with the loss scale"
    if math.isnan(total.sqnr_db):
        if sample.forward_is_finite:
            return "the gradient overflows, and in fp32 it does not"
        return "the forward overflows, and in fp32 it does not, so that no loss scale helps"
    if total.cosine > 0.99 and not 0.7 < total.norm_ratio < 1.4:
        text = f"the gradient has the direction of fp32, but {rounded(total.norm_ratio)} times its length"
        twice = abs(total.norm_ratio * total.scale - 1) < 0.02
        return f"{text}: `training_step` and the plugin both divide by the loss scale" if twice else text
    if first.rounds_to_zero:
        return f"{percent(total.underflow_fraction)} of the gradient rounds to zero"
    return f"the gradient keeps {bits_kept(total.sqnr_db, total.precision)} of fp32"


def _share(row: GradientRow) -> str:
    if math.isnan(row.sqnr_db):
        return ""
    return f" {percent(row.underflow_fraction)}" if row.rounds_to_zero else f" {bits_kept(row.sqnr_db, row.precision)}"


def _healthy(sample: GradientSample, scale: float | None) -> str:
    *parts, total = sample.rows
    if math.isinf(total.sqnr_db):
        return "the gradient equals fp32."
    least = min((row for row in parts if row.largest and row.sqnr_db > 0), key=lambda row: row.sqnr_db, default=total)
    text = f"the gradient keeps {bits_kept(total.sqnr_db, total.precision)} ({total.sqnr_db:.0f} dB)"
    text += f", in `{least.name}` {bits_kept(least.sqnr_db, least.precision)}."
    if total.precision != "fp16":
        return text
    if total.underflow_fraction > 0.01 and scale is not None and scale > total.scale:
        advice = f"`DynamicLossScaler(init_scale={literal(scale)})` (not tried) keeps more"
        return f"{text} {percent(total.underflow_fraction)} of it rounds to zero; {advice}."
    if total.headroom_bits < 0:
        return f"{text} Its largest value, {rounded(total.largest)}, is computed in float32; fp16 has no room for it."
    return f"{text} At the loss scale {exact(total.scale)} it fits, with {total.headroom_bits:.0f} bits of room."


def describe_derivative(found: InaccurateDerivative) -> str:
    """Describe how fp16 changes a derivative inside of the loss."""
    lost = f"keeps {bits_kept(found.sqnr_db, 'fp16')}"
    if math.isnan(found.sqnr_db):
        lost = "overflows"
    elif found.zero > 0:
        lost = f"loses {percent(found.zero)} of its values, which round to zero"
    return (
        f"the derivative inside of the loss, {found.line}, is computed in fp16 without a loss scale, and {lost}\n  fix:"
        " `lightning_amp.precision.scaled_grad(self.trainer, ...)` in the place of `torch.autograd.grad` (not tried)"
    )
