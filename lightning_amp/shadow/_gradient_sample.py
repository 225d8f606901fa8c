"""The gradient of one batch, once in fp32 and once as training computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
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
    inner_product,
    largest,
    underflow_counts,
    widest_dtype,
)
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import TOTAL, GradientRow
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._float8_losses import Float8Losses
from lightning_amp.shadow._ranks import gather
from lightning_amp.shadow._step_watch import LossyDerivative, StepWatch, lossy_derivatives, true_gradients, use
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Trace

_LOWEST, _HIGHEST = -50, 20  # exponents of gradients that the histograms tell apart
_NUM_BINS = _HIGHEST - _LOWEST + 1


@final
class Sample(NamedTuple):
    """One sampled step, on the host.

    Attributes:
        rows: One per row of the table, that of all gradients last.
        histograms: Of true gradients, by row.
        unseen: Modules that were not seen.
        order: Names of rows in the order in which the backward comes to them.
        clipped: Who clips gradients that are still scaled, and where, in words; empty if nobody does.
        derivatives: Derivatives inside of the loss that fp16 does not hold.

    """

    rows: list[GradientRow]
    histograms: dict[str, ExponentHistogram]
    unseen: Sequence[str]
    order: Sequence[str]
    clipped: str
    derivatives: Sequence[LossyDerivative]


@final
class _Seen(NamedTuple):
    """What one rank has seen besides numbers that add up; see :class:`Sample`."""

    unseen: Sequence[str] = ()
    order: Sequence[str] = ()
    clipped: str = ""
    derivatives: Sequence[LossyDerivative] = ()


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
        """Return what adds up over parameters and ranks, [12 + bins], and the largest magnitude, [], both on `device`.

        Parts may lie on several devices, as the parameters do. float64, or the widest dtype that the device has.
        """
        wide = widest_dtype(device)
        zeros = partial(torch.zeros, dtype=wide, device=device)
        top = torch.stack([m.to(device, wide) for m in self.magnitudes]).max() if self.magnitudes else zeros(())
        counts, sums, fp8, histogram = (
            torch.stack([part.to(device) for part in parts]).sum(0).to(wide) if parts else zeros(size)
            for parts, size in ((self.counts, 3), (self.sums, 4), (self.fp8, 3), (self.histograms, _NUM_BINS))
        )
        number = torch.full_like(counts[:1], len(self.counts))
        # NaN has no place in a maximum over ranks, so it is counted.
        is_nan = torch.isnan(top).to(wide).reshape(1)
        return torch.cat([number, is_nan, counts, sums, fp8, histogram]), top.nan_to_num(0.0)


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
    seen = _Seen()
    try:
        seen = _measure(trainer, module, batch, batch_idx, by, scale, row_of, groups)
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
    precision = precision_of(trainer)
    everybodys = gather(trainer, seen)  # what follows from it must be the same on all ranks
    order = next((one.order for one in everybodys if one.order), ())
    return Sample(
        [_row(trainer.global_step, name, scale, sums, top, precision) for name, sums, top in found],
        {name: _histogram(sums) for name, sums, _ in found},
        seen.unseen,
        [root.get(name, name) for name in order],
        next((one.clipped for one in everybodys if one.clipped), ""),
        next((one.derivatives for one in everybodys if one.derivatives), ()),
    )


def precision_of(trainer: Trainer) -> str:
    """Return our name of the precision that training steps run in; empty for one that we have no name for."""
    plugin = trainer.precision_plugin
    name = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}.get(str(plugin.precision), "")
    in_fp8 = name == "bf16" and isinstance(plugin, AmpPrecision) and None in plugin.fp8_layers.values()
    return "fp8" if in_fp8 else name


def _measure(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    by: str,
    scale: float,
    row_of: dict[str, str],
    groups: dict[str, _Group],
) -> _Seen:
    total = groups[TOTAL]
    exact = TrainingPass(trainer, module, upcast=True)
    fp8 = Float8Losses(exact.module, trainer.precision_plugin)
    try:
        with Trace(exact.module, values=False) as trace, fp8, StepWatch(exact.module) as true_step:
            use(true_step, exact)
            exact.run(batch, batch_idx, context=None, trace=trace)
        reference = exact.gradients()
    finally:
        exact.close()
    arrived = [a.parameter for a in trace.arrivals if a.where == "parameter" and not a.is_inner]
    seen = _Seen(trace.unseen, list(dict.fromkeys(row_of[name] for name in arrived if name in row_of)))
    if not reference:
        return seen
    for layer, losses in fp8.counts.items():
        row = layer if by == "module" else f"{layer}.weight"
        for one in (groups[row], total) if row in groups else (total,):
            one.fp8.extend(losses)
    rounded = TrainingPass(trainer, module)
    try:
        with Trace(rounded.module, values=False) as half, StepWatch(rounded.module, scale) as step:
            use(step, rounded)
            context = trainer.precision_plugin.forward_context()
            rounded.run(batch, batch_idx, context=context, scale=scale, trace=half, fp32_draws=True)
        gradients = true_gradients(step, rounded, scale)
        if scale != 1:
            clipped = " and ".join(f"`{name}` ({line})" for line, name in step.clippings.items())
            seen = seen._replace(clipped=clipped, derivatives=lossy_derivatives(true_step, step))
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
            values = gradients.get(name, torch.zeros_like(true))
            sums = torch.cat([fidelity_sums(true, values), inner_product(true, values).reshape(1)])
            for one in (groups[row_of[name]], total):
                one.counts.append(counts)
                one.histograms.append(histogram)
                one.magnitudes.append(largest(true))
                one.sums.append(sums)
    finally:
        rounded.close()
    return seen


def _row(step: int, name: str, scale: float, added: Tensor, top: Tensor, precision: str) -> GradientRow:
    _, nans, zero, subnormal, counted = added[:5].tolist()
    number = max(counted, 1.0)
    top = torch.where(torch.tensor(nans > 0), torch.nan, top)
    sqnr_db = float(fidelity(added[5:8])[0])
    signal, energy, _, product = added[5:9].tolist()
    cosine, length = _cosine(signal, energy, product), math.sqrt(energy / signal) if signal > 0 else math.nan
    room = float(headroom_bits(top, "fp16", scale))
    underflow, saturated, reaching = added[9:12].tolist()
    fp8 = (underflow / reaching, saturated / reaching) if reaching else (None, None)
    return GradientRow(
        step, name, scale, int(counted), zero / number, subnormal / number, room, sqnr_db, cosine, float(top), *fp8,
        length if math.isfinite(length) else math.nan, precision,
    )  # fmt: skip


def _cosine(signal: float, energy: float, product: float) -> float:
    """Return the cosine of two gradients: 1 if both are zero, 0 if one is, NaN if one is not finite."""
    if not math.isfinite(signal + energy + product):
        return math.nan
    if signal == 0 or energy == 0:
        return float(signal == energy)
    return max(-1.0, min(1.0, product / math.sqrt(signal) / math.sqrt(energy)))


def _histogram(added: Tensor) -> ExponentHistogram:
    return ExponentHistogram(added[12:].long(), _LOWEST, _HIGHEST)
