"""Compute the gradient of one batch in fp32 and as training computes it, and compare the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import Fp32Modules
from lightning_amp.findings import TOTAL, GradientRow, GradientSample
from lightning_amp.numerics import (
    HALF_DTYPES,
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
from lightning_amp.shadow._fsdp import counts_here, is_sharded
from lightning_amp.shadow._output_comparison import OutputComparison
from lightning_amp.shadow._ranks import OtherRankFailedError, gather, together
from lightning_amp.shadow._step_watch import StepWatch, inaccurate_derivatives
from lightning_amp.shadow._training_pass import BOUNDARY, TrainingPass
from lightning_amp.tracing import Trace

RowsBy = Literal["module", "parameter"]
"""The kind of rows in the table: one per module, or one per parameter."""


@final
class GradientSampler:
    """Runs one batch twice on copies of the module, and compares the gradients. All ranks must sample together.

    A rank that cannot run its batch calls `on_failure` and adds nothing.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, by: RowsBy,
        on_failure: Callable[[Failure], None],
    ) -> None:  # fmt: skip
        self._trainer, self._module, self._batch, self._batch_idx = trainer, module, batch, batch_idx
        self._by, self._on_failure = by, on_failure
        names = _modules.plain_parameters(module)
        self._row_of = {name: name.rpartition(".")[0] if by == "module" else name for name in names}
        self._index = {row: i for i, row in enumerate(dict.fromkeys([*self._row_of.values(), TOTAL]))}

    def take(
        self, scale: float, *, outputs: OutputComparison | None = None, rules: Sequence[str] = ()
    ) -> GradientSample | None:
        """Run the batch at a loss scale; `None` if no rank has gradients. This waits for the device.

        `outputs` compares the outputs of modules, and `rules` name modules to keep in fp32.
        """
        trainer, step = self._trainer, self._trainer.global_step
        mine = GradientSample([])
        self._clear()
        try:
            with together(trainer):
                mine = self._measure(scale, outputs, rules)
        except Exception as error:
            if not rules and not isinstance(error, OtherRankFailedError):  # a trial may fail
                self._on_failure(Failure.of(error, "the training step", f"the sample of step {step}"))
            self._clear()
        ranks = gather(trainer, mine)  # the decisions below must be the same on all ranks
        if trainer.world_size > 1:
            self._sums = trainer.strategy.reduce(self._sums, reduce_op="sum")
            self._tops = trainer.strategy.reduce(self._tops, reduce_op="max")
        names = [name or type(self._module).__name__ for name in self._index]
        rows = zip(names, self._sums.cpu(), self._tops.cpu(), strict=True)
        found = [_row(step, name, scale, sums, top, precision_of(trainer)) for name, sums, top in rows if sums[0] > 0]
        return (
            mine._replace(
                rows=found,
                order=next((one.order for one in ranks if one.order), ()),
                clipped=next((one.clipped for one in ranks if one.clipped), ""),
                derivatives=next((one.derivatives for one in ranks if one.derivatives), ()),
                forward_is_finite=all(one.forward_is_finite for one in ranks),
            )
            if found
            else None
        )

    def _clear(self) -> None:
        # The dtype is float64, or the widest that the device has. Of each row: the number of gradients, of NaN (which a
        # maximum over ranks cannot represent), `underflow_counts`, `fidelity_sums` and the inner product.
        device = self._trainer.strategy.root_device
        self._sums = torch.zeros(len(self._index), 9, dtype=widest_dtype(device), device=device)
        self._tops = self._sums[:, 0].clone()  # the largest magnitudes

    def _add(self, rows: Iterable[str], magnitude: Tensor, *measured: Tensor) -> None:
        magnitude = magnitude.to(self._sums)
        values = torch.zeros_like(self._sums[0])
        values[1] = magnitude.isnan()
        if measured:
            values[0] = 1
            values[2:] = torch.cat([part.to(values).reshape(-1) for part in measured])
        for row in {*rows, TOTAL}:
            i = self._index[row]
            self._tops[i] = torch.maximum(self._tops[i], magnitude.nan_to_num(0.0, posinf=math.inf))
            self._sums[i] += values

    def _measure(self, scale: float, outputs: OutputComparison | None, rules: Sequence[str]) -> GradientSample:
        """Run the step in fp32 and as training does, and compare their gradients row by row."""
        trainer, module, row_of = self._trainer, self._module, self._row_of
        with closing(TrainingPass(trainer, module, upcast=True)) as fp32_pass:
            fp32_trace, fp32_watch = Trace(fp32_pass.module, BOUNDARY, values=False), StepWatch(fp32_pass.module)
            with outputs.recording(fp32_pass.module) if outputs else nullcontext():
                fp32_pass.run(self._batch, self._batch_idx, context=None, trace=fp32_trace, step_watch=fp32_watch)
            fp32_run = fp32_pass.gradients()
        owners = {name: name.rpartition(".")[0] for name in reversed(row_of)}
        ran = dict.fromkeys(one.call.module for one in fp32_trace.gradients if not one.is_inner)
        order = dict.fromkeys(row_of[name] for owner in ran for name, its in owners.items() if its == owner)
        sample = GradientSample([], [name or type(module).__name__ for name in order])
        if not fp32_run:
            return sample
        with closing(TrainingPass(trainer, module)) as amp_pass, ExitStack() as watching:
            if rules:
                Fp32Modules(amp_pass.module, rules, trainer.strategy.root_device.type, active=True)
            if outputs is not None:
                watching.enter_context(outputs.comparing(amp_pass.module))
            amp_trace, amp_watch = Trace(amp_pass.module, BOUNDARY, values=False), StepWatch(amp_pass.module, scale)
            loss = amp_pass.run(
                self._batch, self._batch_idx, context=trainer.precision_plugin.forward_context(), scale=scale,
                trace=amp_trace, step_watch=amp_watch, fp32_draws=True,
            )  # fmt: skip
            sample = sample._replace(forward_is_finite=loss is None or bool(torch.isfinite(loss).all()))
            amp_run = amp_pass.gradients()
            if scale != 1:
                clipped = " and ".join(f"`{name}` ({line})" for line, name in amp_watch.clippings.items())
                sample = sample._replace(clipped=clipped, derivatives=inaccurate_derivatives(fp32_watch, amp_watch))
            rows = {row_of[name] for name in fp32_run}
            in_half = {one.call.key for one in amp_trace.gradients if one.dtype in HALF_DTYPES and not one.is_inner}
            for one in fp32_trace.read().gradients:
                # Gradients of operations count, because they may be larger than gradients of parameters.
                if one.call.key in in_half and not one.is_inner:
                    name = one.call.module or ""
                    self._add([name] if self._by == "module" and name in rows else [], one.arrived.size)
            counted = _counted(trainer, module)
            for name, gradient in fp32_run.items():
                # A gradient that exists only in fp32 is lost in mixed precision.
                values = amp_run.get(name, torch.zeros_like(gradient))
                counts, product = underflow_counts(gradient, scale), inner_product(gradient, values)
                measured = (counts, fidelity_sums(gradient, values), product) if name in counted else ()
                self._add([row_of[name]], largest(gradient), *measured)
        return sample


def precision_of(trainer: Trainer) -> str:
    """Return our name for the precision of training steps; empty if we have no name for it."""
    plugin = trainer.precision_plugin
    name = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}.get(str(plugin.precision), "")
    in_fp8 = name == "bf16" and isinstance(plugin, AmpPrecision) and None in plugin.fp8_layers.values()
    return "fp8" if in_fp8 else name


def _counted(trainer: Trainer, module: LightningModule) -> set[str]:
    """Return the parameters whose gradients this rank counts: each value of a sharded gradient counts on one rank."""
    parameters = _modules.plain_parameters(module)
    if not is_sharded(trainer):
        return set(parameters)
    model = cast(nn.Module, trainer.strategy.model)
    return {name for name, parameter in parameters.items() if counts_here(parameter, model)}


def _row(step: int, name: str, scale: float, added: Tensor, top: Tensor, precision: str) -> GradientRow:
    _, nans, zero, subnormal, counted = added[:5].tolist()
    signal, energy, _, product = added[5:9].tolist()
    number = max(counted, 1.0)
    norm_ratio, length = math.sqrt(energy / signal) if signal > 0 else math.nan, math.sqrt(signal) * math.sqrt(energy)
    # 1 if both gradients are zero, 0 if one is, NaN if one is not finite
    cosine = max(-1.0, min(1.0, product / length)) if length else float(signal == energy)
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
        cosine=cosine if math.isfinite(signal + energy + product) else math.nan,
        largest=float(top),
        norm_ratio=norm_ratio if math.isfinite(norm_ratio) else math.nan,
        precision=precision,
    )
