"""Compute the gradient of one batch in fp32 and as training computes it, and compare the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp.casting import Fp32Modules, our_name
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
        gathered = gather(trainer, (mine, self._sums.cpu(), self._tops.cpu()))  # all ranks decide the same below
        ranks, sums, tops = zip(*gathered, strict=True)
        names = [name or type(self._module).__name__ for name in self._index]
        rows = zip(names, torch.stack(sums).sum(0), torch.stack(tops).amax(0), strict=True)
        found = [
            _row(step, name, scale, added, top, precision_of(trainer)) for name, added, top in rows if added[0] > 0
        ]
        most = max(ranks, key=lambda one: len(one.order))
        forward, loss = all(r.forward_is_finite for r in ranks), all(r.fp32_loss_is_finite for r in ranks)
        return most._replace(rows=found, forward_is_finite=forward, fp32_loss_is_finite=loss) if found else None

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
        row_of = self._row_of
        fp32, fp32_trace, fp32_loss, _ = self._run(outputs, in_fp32=True)
        owners = {name: name.rpartition(".")[0] for name in reversed(row_of)}
        ran = dict.fromkeys(one.call.module for one in fp32_trace.gradients if not one.is_inner)
        order = dict.fromkeys(row_of[name] for owner in ran for name, its in owners.items() if its == owner)
        names = [name or type(self._module).__name__ for name in order]
        if not fp32:
            return GradientSample([], names)
        amp, amp_trace, amp_loss, is_edited = self._run(outputs, scale, rules)
        # a loss that is not finite in fp32 either may have finite gradients
        finite, fp32_finite = (one is None or bool(torch.isfinite(one).all()) for one in (amp_loss, fp32_loss))
        may_clip = is_edited or not self._module.automatic_optimization
        sample = GradientSample([], names, finite or not fp32_finite, fp32_finite, may_clip)
        rows = {row_of[name] for name in fp32}
        # of each operation the first gradient that is not cast: a loss that casts its inputs gets it in float32
        nodes = [one for one in amp_trace.gradients if one.arrived_in is one.dtype and not one.is_inner]
        dtypes = {one.call.key: one.dtype for one in reversed(nodes)}
        for one in fp32_trace.read().gradients:
            # Gradients of operations count, because they may be larger than gradients of parameters. Infinite ones do
            # not: parameters show them, unless a mask such as ReLU's drops them.
            magnitude = torch.tensor(max(abs(one.arrived.low), abs(one.arrived.high)))
            if dtypes.get(one.call.key) in HALF_DTYPES and not one.is_inner and magnitude.isfinite():
                name = one.call.module or ""
                self._add([name] if self._by == "module" and name in rows else [], magnitude)
        model, parameters = cast(nn.Module, self._trainer.strategy.model), _modules.plain_parameters(self._module)
        for name, gradient in fp32.items():
            # A gradient that exists only in fp32 is lost in mixed precision.
            values = amp.get(name, torch.zeros_like(gradient))
            counts, product = underflow_counts(gradient, scale), inner_product(gradient, values)
            measured = counts, fidelity_sums(gradient, values), product
            # each value of a sharded gradient counts on one rank
            is_mine = not is_sharded(self._trainer) or counts_here(parameters[name], model)
            self._add([row_of[name]], largest(gradient), *(measured if is_mine else ()))
        return sample

    def _run(
        self, outputs: OutputComparison | None, scale: float = 1.0, rules: Sequence[str] = (), *, in_fp32: bool = False
    ) -> tuple[dict[str, Tensor], Trace, Tensor | None, bool]:
        """Return the gradients, the trace, the loss, and whether a hook changed gradients."""
        trainer = self._trainer
        with closing(TrainingPass(trainer, self._module, upcast=in_fp32)) as one, ExitStack() as watching:
            if rules:
                Fp32Modules(one.module, rules, trainer.strategy.root_device.type, active=True)
            if outputs is not None:
                watching.enter_context((outputs.recording if in_fp32 else outputs.comparing)(one.module))
            trace = Trace(one.module, BOUNDARY, values=False)
            context = None if in_fp32 else trainer.precision_plugin.forward_context()
            loss = one.run(
                self._batch, self._batch_idx, context=context, scale=scale, trace=trace, fp32_draws=not in_fp32
            )
            return one.gradients(), trace, loss, one.is_edited


def precision_of(trainer: Trainer) -> str:
    """Return our name for the precision of training steps, or Lightning's if we have none."""
    plugin = trainer.precision_plugin
    name = our_name(str(plugin.precision))
    in_fp8 = name == "bf16" and isinstance(plugin, AmpPrecision) and None in plugin.fp8_layers.values()
    return "fp8" if in_fp8 else name


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
