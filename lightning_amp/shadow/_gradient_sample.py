"""Compute the gradient of one batch in fp32 and as training computes it, and compare the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.findings import TOTAL, GradientRow, InaccurateDerivative
from lightning_amp.numerics import (
    fidelity,
    fidelity_sums,
    headroom_bits,
    inner_product,
    largest,
    underflow_counts,
    widest_dtype,
)
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._fsdp2 import counts_here
from lightning_amp.shadow._ranks import OtherRankFailedError, gather, together
from lightning_amp.shadow._step_watch import StepWatch, inaccurate_derivatives
from lightning_amp.shadow._surroundings import is_sharded
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Trace

RowsBy = Literal["module", "parameter"]
"""The kind of rows in the table: one per module, or one per parameter."""


@final
class Sample(NamedTuple):
    """The results of one sampled step, on the host.

    Attributes:
        rows: The rows of the table; the last row is about all gradients.
        unseen: Modules that could not be watched.
        order: Names of the rows in the order of the backward.
        clipped: The functions that clip scaled gradients, with their lines, in words; empty without any.
        derivatives: Derivatives inside the loss that are inaccurate in fp16.

    """

    rows: list[GradientRow]
    unseen: Sequence[str] = ()
    order: Sequence[str] = ()
    clipped: str = ""
    derivatives: Sequence[InaccurateDerivative] = ()


@final
class _Group:
    """Measurements of the gradients of one row, on the device."""

    def __init__(self) -> None:
        self.counts, self.sums, self.magnitudes = list[Tensor](), list[Tensor](), list[Tensor]()

    def add(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the counts and sums of the row, [9], and its largest magnitude, [], both on `device`.

        Measurements may be on several devices, as the parameters are. The dtype is float64, or the widest that the
        device has.
        """
        wide = widest_dtype(device)
        zeros = partial(torch.zeros, dtype=wide, device=device)
        top = torch.stack([m.to(device, wide) for m in self.magnitudes]).max() if self.magnitudes else zeros(())
        counts, sums = (
            torch.stack([part.to(device) for part in parts]).sum(0).to(wide) if parts else zeros(size)
            for parts, size in ((self.counts, 3), (self.sums, 4))
        )
        number = torch.full_like(counts[:1], len(self.counts))
        # A maximum over ranks cannot represent NaN, so NaN is counted.
        is_nan = torch.isnan(top).to(wide).reshape(1)
        return torch.cat([number, is_nan, counts, sums]), top.nan_to_num(0.0)


def take_sample(
    trainer: Trainer,
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    by: RowsBy,
    scale: float,
    on_failure: Callable[[Failure], None],
) -> Sample | None:
    """Run the batch twice on copies of the module; `None` if no rank has gradients. This waits for the device.

    All ranks must call this, because the figures combine all ranks. A rank that cannot run its batch calls
    `on_failure` and adds nothing.
    """
    try:
        with together(trainer):
            groups, mine = _measure(trainer, module, batch, batch_idx, by, scale)
    except Exception as error:
        if not isinstance(error, OtherRankFailedError):
            on_failure(Failure.of(error, "the training step", f"the sample of step {trainer.global_step}"))
        groups, mine = _groups(module, by), Sample([])
    ranks = gather(trainer, mine)  # the decisions below must be the same on all ranks
    sums = _over_all_ranks(trainer, groups)
    if not sums:
        return None
    names = {name: name or type(module).__name__ for name in groups}
    step, precision = trainer.global_step, precision_of(trainer)
    return Sample(
        rows=[_row(step, names[name], scale, *row, precision) for name, row in sums.items()],
        unseen=mine.unseen,
        order=[names[name] for name in next((one.order for one in ranks if one.order), ())],
        clipped=next((one.clipped for one in ranks if one.clipped), ""),
        derivatives=next((one.derivatives for one in ranks if one.derivatives), ()),
    )


def rows_of_parameters(module: LightningModule, by: RowsBy) -> dict[str, str]:
    """Return the row of the table for each parameter; the row of the outermost module is called ""."""
    names = _modules.plain_parameters(module)
    return {name: name.rpartition(".")[0] if by == "module" else name for name in names}


def precision_of(trainer: Trainer) -> str:
    """Return our name for the precision of training steps; empty if we have no name for it."""
    plugin = trainer.precision_plugin
    name = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}.get(str(plugin.precision), "")
    in_fp8 = name == "bf16" and isinstance(plugin, AmpPrecision) and None in plugin.fp8_layers.values()
    return "fp8" if in_fp8 else name


def _groups(module: LightningModule, by: RowsBy) -> dict[str, _Group]:
    return {row: _Group() for row in (*rows_of_parameters(module, by).values(), TOTAL)}


def _measure(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, by: RowsBy, scale: float
) -> tuple[dict[str, _Group], Sample]:
    """Run the step in fp32 and as training does, and compare their gradients row by row."""
    row_of, groups = rows_of_parameters(module, by), _groups(module, by)
    total = groups[TOTAL]
    with closing(TrainingPass(trainer, module, upcast=True)) as fp32_pass:
        fp32_trace, fp32_watch = Trace(fp32_pass.module, values=False), StepWatch(fp32_pass.module)
        fp32_pass.run(batch, batch_idx, context=None, trace=fp32_trace, step_watch=fp32_watch)
        fp32_run = fp32_pass.gradients()
    places = [arrival.place for arrival in fp32_trace.arrivals if not arrival.is_inner]
    order = [row_of[place.parameter] for place in places if place.where == "parameter" and place.parameter in row_of]
    sample = Sample([], fp32_trace.unseen, list(dict.fromkeys(order)))
    if not fp32_run:
        return groups, sample
    with closing(TrainingPass(trainer, module)) as amp_pass:
        amp_trace, amp_watch = Trace(amp_pass.module, values=False), StepWatch(amp_pass.module, scale)
        context = trainer.precision_plugin.forward_context()
        amp_pass.run(
            batch, batch_idx, context=context, scale=scale, trace=amp_trace, step_watch=amp_watch, fp32_draws=True
        )
        amp_run = amp_pass.true_gradients()
        if scale != 1:
            clipped = " and ".join(f"`{name}` ({line})" for line, name in amp_watch.clippings.items())
            sample = sample._replace(clipped=clipped, derivatives=inaccurate_derivatives(fp32_watch, amp_watch))
        rows = {row_of[name] for name in fp32_run}
        for arrival in fp32_trace.gradients_in_half(amp_trace.half_places):
            # Gradients of outputs count, because they may be larger than gradients of parameters.
            total.magnitudes.append(arrival.largest)
            name = "" if arrival.call is None else arrival.call.name
            if by == "module" and arrival.place.where == "output" and name in rows:
                groups[name].magnitudes.append(arrival.largest)
        counted = _counted(trainer, module)
        for name, gradient in fp32_run.items():
            for one in (groups[row_of[name]], total):
                one.magnitudes.append(largest(gradient))
            if name not in counted:
                continue
            counts = underflow_counts(gradient, scale)
            # A gradient that exists only in fp32 is lost in mixed precision.
            values = amp_run.get(name, torch.zeros_like(gradient))
            sums = torch.cat([fidelity_sums(gradient, values), inner_product(gradient, values).reshape(1)])
            for one in (groups[row_of[name]], total):
                one.counts.append(counts)
                one.sums.append(sums)
    return groups, sample


def _counted(trainer: Trainer, module: LightningModule) -> set[str]:
    """Return the parameters whose gradients this rank counts: each value of a sharded gradient counts on one rank."""
    parameters = _modules.plain_parameters(module)
    if not is_sharded(trainer):
        return set(parameters)
    model = cast(nn.Module, trainer.strategy.model)
    return {name for name, parameter in parameters.items() if counts_here(parameter, model)}


def _over_all_ranks(trainer: Trainer, groups: Mapping[str, _Group]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the sums, [9], and the largest magnitude, [], of each row with gradients, on the host."""
    device = trainer.strategy.root_device
    added, tops = (torch.stack(list(parts)) for parts in zip(*(g.add(device) for g in groups.values()), strict=True))
    if trainer.world_size > 1:
        added, tops = trainer.strategy.reduce(added, reduce_op="sum"), trainer.strategy.reduce(tops, reduce_op="max")
    rows = zip(groups, added.cpu(), tops.cpu(), strict=True)
    return {name: (sums, top) for name, sums, top in rows if sums[0] > 0}


def _row(step: int, name: str, scale: float, added: Tensor, top: Tensor, precision: str) -> GradientRow:
    _, nans, zero, subnormal, counted = added[:5].tolist()
    signal, energy, _, product = added[5:9].tolist()
    number = max(counted, 1.0)
    norm_ratio = math.sqrt(energy / signal) if signal > 0 else math.nan
    top = torch.where(torch.tensor(nans > 0), torch.nan, top)
    return GradientRow(
        step,
        name,
        scale,
        num_values=int(counted),
        underflow_fraction=zero / number,
        subnormal_fraction=subnormal / number,
        headroom_bits=float(headroom_bits(top, scale)),
        sqnr_db=float(fidelity(added[5:8])[0]),
        cosine=_cosine(signal, energy, product),
        largest=float(top),
        norm_ratio=norm_ratio if math.isfinite(norm_ratio) else math.nan,
        precision=precision,
    )


def _cosine(signal: float, energy: float, product: float) -> float:
    """Return the cosine of two gradients: 1 if both are zero, 0 if one is, NaN if one is not finite."""
    if not math.isfinite(signal + energy + product):
        return math.nan
    if signal == 0 or energy == 0:
        return float(signal == energy)
    return max(-1.0, min(1.0, product / math.sqrt(signal) / math.sqrt(energy)))
