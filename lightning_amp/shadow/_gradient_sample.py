"""The gradient of one batch, once in fp32 and once as training computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.numerics import (
    ExponentHistogram,
    exponent_histogram,
    fidelity,
    fidelity_sums,
    headroom_bits,
    largest,
    underflow_counts,
)
from lightning_amp.reports import TOTAL, GradientRow
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._float8_losses import Float8Losses
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Trace, full_precision

_LOWEST, _HIGHEST = -50, 20  # exponents of gradients that the histograms tell apart
_NUM_BINS = _HIGHEST - _LOWEST + 1


@final
class Sample(NamedTuple):
    """One sampled step: its rows, one histogram of true gradients per row, on the host; modules that were not seen."""

    rows: list[GradientRow]
    histograms: dict[str, ExponentHistogram]
    unseen: list[str]


@final
class _Group:
    """What is known about the gradients of one row; everything is on the device."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.magnitudes: list[Tensor] = []
        self.histograms: list[Tensor] = []
        self.fp8: list[Tensor] = []

    def add(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what adds up over parameters and ranks, float64 [11 + bins], and the largest magnitude, float64 []."""
        top = torch.stack([m.double() for m in self.magnitudes]).max() if self.magnitudes else _zeros(device)
        counts, sums, fp8, histogram = (
            torch.stack(parts).sum(0).double() if parts else _zeros(device, size)
            for parts, size in ((self.counts, 3), (self.sums, 3), (self.fp8, 3), (self.histograms, _NUM_BINS))
        )
        number = torch.full_like(counts[:1], len(self.counts))
        # NaN has no place in a maximum over ranks, so it is counted.
        return torch.cat([number, torch.isnan(top).double().reshape(1), counts, sums, fp8, histogram]), top.nan_to_num(
            0.0
        )


def _zeros(device: torch.device, *size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device=device)


def take_sample(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    by: str,
    scale: float,
    on_failure: Callable[[Failure], None],
) -> Sample | None:
    """Run the batch twice on copies of the module; `None` if no rank has gradients. Waits for the device.

    All ranks must call: figures are over the values of all of them. One that cannot run its batch, of which
    `on_failure` is told, has none to add.
    """
    names = list(_modules.plain_parameters(module))
    row_of = {name: name.rpartition(".")[0] if by == "module" else name for name in names}
    groups = {row: _Group() for row in (*row_of.values(), TOTAL)}
    unseen: list[str] = []
    try:
        unseen = _measure(trainer, module, batch, batch_idx, by, scale, row_of, groups)
    except Exception as error:
        place = f"the sample of step {trainer.global_step}"
        on_failure(Failure.of(error, "the training step", place))
        groups = {row: _Group() for row in groups}
    device = trainer.strategy.root_device
    measured = [group.add(device) for group in groups.values()]
    added, tops = (torch.stack(list(parts)) for parts in zip(*measured, strict=True))
    if trainer.world_size > 1:
        added, tops = trainer.strategy.reduce(added, reduce_op="sum"), trainer.strategy.reduce(tops, reduce_op="max")
    added, tops = added.cpu(), tops.cpu()
    root = {"": type(module).__name__}
    found = [(root.get(n, n), a, t) for n, a, t in zip(groups, added, tops, strict=True) if a[0] > 0]
    if not found:
        return None
    return Sample(
        [_row(trainer.global_step, name, scale, sums, top) for name, sums, top in found],
        {name: _histogram(sums) for name, sums, _ in found},
        unseen,
    )


def _measure(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    by: str,
    scale: float,
    row_of: dict[str, str],
    groups: dict[str, _Group],
) -> list[str]:
    device_type = trainer.strategy.root_device.type
    total = groups[TOTAL]
    exact = TrainingPass(trainer, module, upcast=True)
    fp8 = Float8Losses(exact.module, trainer.precision_plugin)
    try:
        with Trace(exact.module, values=False) as trace, fp8:
            exact.run(batch, batch_idx, context=full_precision(device_type), trace=trace)
        reference = exact.gradients()
    finally:
        exact.close()
    if not reference:
        return trace.unseen
    for layer, losses in fp8.counts.items():
        row = layer if by == "module" else f"{layer}.weight"
        for one in (groups[row], total) if row in groups else (total,):
            one.fp8.extend(losses)
    rounded = TrainingPass(trainer, module)
    try:
        with Trace(rounded.module, values=False) as half:
            context = trainer.precision_plugin.forward_context()
            rounded.run(batch, batch_idx, context=context, scale=scale, trace=half)
        gradients = rounded.gradients()
        rows = {row_of[name] for name in reference}
        for arrival in trace.gradients_in_half(half.half_places):
            # Gradients of outputs, too: they may be larger than those of parameters.
            total.magnitudes.append(arrival.largest)
            if by == "module" and arrival.where == "output" and arrival.call is not None and arrival.call.name in rows:
                groups[arrival.call.name].magnitudes.append(arrival.largest)
        for name, true in reference.items():
            counts = underflow_counts(true, "fp16", scale)
            histogram = exponent_histogram(true, _LOWEST, _HIGHEST).counts
            # What only fp32 has a gradient for is lost in mixed precision.
            sums = fidelity_sums(true, gradients[name] / scale if name in gradients else torch.zeros_like(true))
            for one in (groups[row_of[name]], total):
                one.counts.append(counts)
                one.histograms.append(histogram)
                one.magnitudes.append(largest(true))
                one.sums.append(sums)
    finally:
        rounded.close()
    return trace.unseen


def _row(step: int, name: str, scale: float, added: Tensor, top: Tensor) -> GradientRow:
    _, nans, zero, subnormal, counted = added[:5].tolist()
    number = max(counted, 1.0)
    top = torch.where(torch.tensor(nans > 0), torch.nan, top)
    sqnr_db, cosine = (float(value) for value in fidelity(added[5:8]))
    room = float(headroom_bits(top, "fp16", scale))
    underflow, saturated, reaching = added[8:11].tolist()
    fp8 = (underflow / reaching, saturated / reaching) if reaching else (None, None)
    return GradientRow(
        step, name, scale, int(counted), zero / number, subnormal / number, room, sqnr_db, cosine, float(top), *fp8
    )


def _histogram(added: Tensor) -> ExponentHistogram:
    return ExponentHistogram(added[11:].long(), _LOWEST, _HIGHEST)
