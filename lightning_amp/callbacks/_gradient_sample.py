"""The gradient of one batch, once in fp32 and once as training computes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_amp.callbacks._gradient_table import TOTAL, GradientRow
from lightning_amp.callbacks._shadow import full_precision
from lightning_amp.callbacks._training_pass import TrainingPass
from lightning_amp.numerics import (
    ExponentHistogram,
    Trace,
    exponent_histogram,
    fidelity,
    fidelity_sums,
    headroom_bits,
    largest,
    underflow_counts,
)


class Sample(NamedTuple):
    """One sampled step: its rows, one histogram of true gradients per row, on the host."""

    rows: list[GradientRow]
    histograms: dict[str, ExponentHistogram]


class _Group:
    """What is known about the gradients of one row; everything is on the device."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.magnitudes: list[Tensor] = []
        self.histograms: list[ExponentHistogram] = []

    def measured(self, scale: float) -> Tensor:
        """Counts [3], SQNR, cosine, headroom, largest: float64 [7]."""
        top = torch.stack([m.double() for m in self.magnitudes]).max()
        zero = top.new_zeros(3)
        counts = torch.stack(self.counts).sum(0).double() if self.counts else zero
        quality = fidelity(torch.stack(self.sums).sum(0).double() if self.sums else zero)
        room = headroom_bits(top, "fp16", scale).double()
        return torch.cat([counts, torch.stack([*quality, room, top])])


def take_sample(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, by: str, scale: float
) -> Sample | None:
    """Run the batch twice on copies of the module; `None` if it has no gradients. Waits for the device."""
    device_type = trainer.strategy.root_device.type
    total = _Group()
    exact = TrainingPass(trainer, module)
    try:
        with Trace(exact.module, values=False) as trace:
            exact.run(batch, batch_idx, context=full_precision(device_type), trace=trace)
        reference = exact.gradients()
    finally:
        exact.close()
    if not reference:
        return None
    row_of = {name: name.rpartition(".")[0] if by == "module" else name for name in reference}
    groups = {row: _Group() for row in row_of.values()}
    for arrival in trace.arrivals:
        # What autocast computes in half precision: gradients of outputs, too, and they may be larger.
        total.magnitudes.append(arrival.largest)
        if by == "module" and arrival.where == "output" and arrival.call is not None and arrival.call.name in groups:
            groups[arrival.call.name].magnitudes.append(arrival.largest)
    rounded = TrainingPass(trainer, module)
    try:
        rounded.run(batch, batch_idx, context=trainer.precision_plugin.forward_context(), scale=scale)
        gradients = rounded.gradients()
        for name, true in reference.items():
            counts, histogram = underflow_counts(true, "fp16", scale), exponent_histogram(true)
            sums = fidelity_sums(true, gradients[name] / scale) if name in gradients else None
            for one in (groups[row_of[name]], total):
                one.counts.append(counts)
                one.histograms.append(histogram)
                one.magnitudes.append(largest(true))
                if sums is not None:
                    one.sums.append(sums)
    finally:
        rounded.close()
    named = {name or type(module).__name__: group for name, group in groups.items()}
    return _read({**named, TOTAL: total}, trainer.global_step, scale)


def _read(groups: dict[str, _Group], step: int, scale: float) -> Sample:
    """Everything to the host, in two transfers."""
    measured = torch.stack([group.measured(scale) for group in groups.values()]).tolist()
    counts = torch.stack([torch.stack([h.counts for h in g.histograms]).sum(0) for g in groups.values()]).cpu()
    rows: list[GradientRow] = []
    histograms: dict[str, ExponentHistogram] = {}
    for i, (name, group) in enumerate(groups.items()):
        zero, subnormal, counted, sqnr_db, cosine, room, top = measured[i]
        number = max(counted, 1.0)
        rows.append(
            GradientRow(step, name, scale, int(counted), zero / number, subnormal / number, room, sqnr_db, cosine, top)
        )
        histograms[name] = ExponentHistogram(counts[i], group.histograms[0].lowest, group.histograms[0].highest)
    return Sample(rows, histograms)
