"""Write the sentences of `GradientMonitor`: the fault of a gradient and its remedies, or how well it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_amp._text import exact, percent, rounded
from lightning_amp.findings import LOW_DB, TOTAL, GradientFault, GradientRow, InaccurateDerivative, TriedRemedy


def describe_fault(found: GradientFault, tried: Sequence[TriedRemedy], *, faded: float = 1.0) -> str:
    """Describe a fault, the first module with the fault, and the remedies that work.

    `faded` is the largest gradient of this sample, in units of the largest so far.
    """
    row = found.row
    first = "" if row.name == TOTAL else f", first in `{row.name}`"
    if found.kind in ("nan", "infinite"):
        what = "NaN" if found.kind == "nan" else "infinite"
        return f"The gradient is {what} in fp32, too{first}: no precision and no loss scale helps."
    if found.kind == "length":
        text = _wrong_length(found)
    elif found.kind == "overflow":
        at = f" at a loss scale of {exact(row.scale)}" if row.precision in ("fp16", "") else ""
        text = f"The gradient overflows in {row.precision or 'fp16'}{at}{first}; in fp32 it is finite."
    else:
        text = _noise(found, first, faded)
    works = [f"{one.setting} (tried: {_decibels(one.value)})" for one in tried if one.works]
    if works:
        return f"{text} Try: {' or '.join(works)}."
    if tried:
        text += f" Tried, each without success: {', '.join(one.setting for one in tried)}."
    return f"{text} `compare_precisions` tells whether that costs quality." if found.kind == "rounding" else text


def _noise(found: GradientFault, first: str, faded: float) -> str:
    row = found.row
    numbers = f"SQNR {_decibels(row.sqnr_db)}, cosine {row.cosine:.4f}"
    where = f"The gradient differs from fp32{first} ({numbers})"
    if not found.whole:
        where = f"The gradient of `{row.name}` differs from fp32 ({numbers})"
    if found.kind == "zero":
        lost = percent(row.underflow_fraction)
        return f"{where}: {lost} of its values become zero at a loss scale of {exact(row.scale)}."
    text = f"{where}: it is in range, but what {row.precision or 'fp16'} rounds away is as large as the gradient."
    if found.whole and faded < 0.01:
        text += f" It has become small, {percent(faded)} of the largest so far: late in a training that is usual."
    return text


def _wrong_length(found: GradientFault) -> str:
    total = found.total
    times, scale = f"{rounded(total.norm_ratio)} times the length", exact(total.scale)
    if found.clipped:
        has = "differs from fp32" if math.isnan(total.norm_ratio) else f"has {times} that it has in fp32"
        return (
            f"The gradient {has}: {found.clipped} clips it while it is multiplied with the loss scale, {scale}. Call"
            " `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it (not tried)."
        )
    text = f"The gradient has the same direction as in fp32 (cosine {total.cosine:.4f}), but {times}"
    if abs(total.norm_ratio * total.scale - 1) < 0.02 and total.scale != 1:
        return f"{text}, which is 1 / loss scale: both `training_step` and the plugin divide by it."
    return (
        f"{text}. If `training_step` changes gradients itself, they are still multiplied with the loss scale, {scale}:"
        " call `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it."
    )


def describe_derivative(found: InaccurateDerivative, helps: bool) -> str:
    """Describe how fp16 changes a derivative, and whether `scaled_grad` helps."""
    lost = f"its SQNR is {found.sqnr_db:.1f} dB"
    if math.isnan(found.sqnr_db):
        lost = "it overflows"
    elif found.zero > 0:
        lost = f"{percent(found.zero)} of its values become zero"
    cure = "`lightning_amp.precision.scaled_grad(self.trainer, ...)` in the place of `torch.autograd.grad`"
    helped = f". Use {cure} ({'tried: works' if helps else 'not tried'})"
    return (
        f"the derivative inside of the loss, {found.line}, is computed in fp16 without a loss scale, and differs from"
        f" fp32: {lost}{helped}."
    )


def _decibels(sqnr_db: float) -> str:
    if math.isnan(sqnr_db):
        return "overflows"
    return "equal" if math.isinf(sqnr_db) else f"{sqnr_db:.1f} dB"


def describe_healthy(rows: Sequence[GradientRow], largest: float, scale: float | None) -> str:
    """Sum up a sample without a fault. The last row of the sample is about all gradients together.

    `largest` is the largest finite gradient so far, and `scale` the loss scale to recommend.
    """
    *parts, last = rows
    if last.largest == 0:
        return "All gradients of the last sample are zero."
    least = min((row for row in parts if row.largest > 0), key=lambda row: row.sqnr_db, default=last)
    if last.precision not in ("fp16", ""):
        if math.isinf(last.sqnr_db):
            return "The gradient equals fp32."
        text = f"The gradient equals fp32 up to rounding (SQNR {last.sqnr_db:.1f} dB)"
        return f"{text}; the gradient of `{least.name}` is furthest from it, with {least.sqnr_db:.1f} dB."
    if scale is None:
        return "No gradient was finite, so no scale can be recommended."
    if scale < 1:
        return (
            f"The largest gradient, {rounded(largest)}, fits into fp16 only with a scale of {exact(scale)}:"
            f" divide the loss by a constant, {exact(1 / scale)} at least."
        )
    text = f"For fp16, start with `DynamicLossScaler(init_scale=2.0**{int(math.log2(scale))})`"
    if last.underflow_fraction > 0.01 and last.scale < scale:
        return f"{text}: at {exact(last.scale)}, {last.underflow_fraction:.0%} of the gradients become zero."
    if last.headroom_bits < 0:
        now = f"at {exact(last.scale)} the largest gradient leaves the range of fp16"
        return f"{text}: {now}. It does not overflow, since this run computes it in float32."
    if least.sqnr_db < LOW_DB:  # usual for a bias before a normalisation, whose true gradient is zero
        return f"{text}. The gradient of `{least.name}` is furthest from fp32, with {least.sqnr_db:.1f} dB."
    fits = f"At the loss scale {exact(last.scale)} the gradients fit into fp16"
    if last.scale == scale:
        return f"{fits}, and the largest one has at least 2 bits of room."
    start = f"`DynamicLossScaler(init_scale=2.0**{int(math.log2(scale))})`"
    return f"{fits}. {start} leaves the largest one at least 2 bits of room."
