"""`GradientMonitor`: show whether gradients fit into fp16, and how close they are to fp32."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import require_choice, require_count
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp.callbacks._observer import Observer, log_metrics, no_mixed_precision, why_not_twice
from lightning_amp.causes import lost_in_training
from lightning_amp.findings import GradientRow, GradientSample
from lightning_amp.numerics import fitting_scale
from lightning_amp.reports import GradientTable, describe_gradient
from lightning_amp.scaling import Saved
from lightning_amp.shadow import Failure, GradientSampler, RowsBy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNDERFLOW_FRACTION = "amp/underflow_fraction"
HEADROOM_BITS = "amp/headroom_bits"
GRADIENT_SQNR_DB = "amp/gradient_sqnr_db"

_MAX_CAUSES = 8
"""The number of faults in one run against which a setting is tried."""
_PATIENCE = 20
"""The number of steps to wait for the first one that is applied."""


@final
class GradientMonitor(Observer):
    """Shows whether gradients fit into fp16, and how far mixed precision moves them.

    .. code-block:: python

        monitor = GradientMonitor(every_n_steps=100)
        trainer = L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[monitor], max_epochs=1)
        trainer.fit(model, data)
        print(monitor.table)
        print(monitor.recommended_scale)  # for `DynamicLossScaler(init_scale=...)`

    In a sampled step the batch is run twice more, forward and backward, on copies of the module with the same weights
    and random numbers. One run is in true fp32, without autocast, TF32 and your own casts to half precision; it gives
    the true gradients. The other run computes as training does; it gives the gradients of mixed precision.

    ========================== =====================================================================================
    key                        value, at every sampled step, over all parameters
    ========================== =====================================================================================
    `amp/underflow_fraction`   share of the non-zero true gradients that become zero in fp16 at the current scale
    `amp/headroom_bits`        how often the scale could be doubled before the largest gradient (of a parameter or of a
                               module's output) leaves fp16: log2(65504 / largest scaled gradient). Negative if it
                               overflows. Gradients inside of `torch.autograd.grad` carry no scale and do not count
    `amp/gradient_sqnr_db`     signal to noise of the mixed-precision gradient against fp32: 6 dB are one correct bit.
                               Not logged if the gradient overflowed
    ========================== =====================================================================================

    In small networks fp16 gradients keep some 10 of 11 bits and bf16 gradients some 7 of 8, in deep ones less. fp8
    gradients keep 3 to 6. A bit is 6 dB; at 20 dB the noise is a tenth of the gradient.

    :attr:`table` has these values per module, and :meth:`plot` draws them as a heat map. :attr:`recommended_scale` is a
    good start for `DynamicLossScaler`. The monitor works in every precision of `AmpPrecision`. Table and plot show the
    limits of fp16 for steps in fp16 only. In DDP each rank examines the gradients of its own batch, before they are
    averaged; the figures cover the values of all ranks, and are the same on each.

    The monitor never changes results: weights are bit-identical with and without it. User code outside of the module
    (prints, files, global variables) runs again in a sampled step. A module compiled by `torch.compile` runs eagerly in
    the sample. In modules compiled by TorchScript only the gradients of parameters are seen. (The sample may be the
    first run of a TorchScript *function* that the module does not hold. TorchScript optimizes it from its second run
    on, so the last bits of the first training step may then differ.)

    Args:
        every_n_steps: Optimizer steps between two samples: every multiple is sampled. The first sample is the step
            after the first applied one: by then the scale has settled, and layers that begin at zero have moved. A fit
            with one sample only gets another one at its last batch. With accumulation the first batch of a step is
            sampled.
        by: Rows of the table: `"module"` or `"parameter"`.

    Attributes:
        table: The rows of all samples (`step, name, scale, num_values, ...`). Prints the latest.

    Raises:
        ValueError: If an argument is out of its range.

    One line at the end of fit sums up the last sample. It names the module that keeps the fewest bits, if the last two
    samples show it. If a gradient is lost, it says where. If values round to zero or overflow, it names a loss scale.
    If a module keeps few bits, or its output overflows, it names the module whose output is furthest from fp32,
    although its inputs are close. It says whether that scale, or `fp32_modules=[module]`, helped in a trial. If the
    gradient has the direction of fp32 and another length, the line says so: `training_step` or `on_after_backward` may
    clip gradients while they are multiplied with the loss scale (:func:`~lightning_amp.precision.unscale_`). If two
    samples in a row show this, the monitor says so at once, and not at the end.

    Cost: a sample takes one more step forward and backward, one in fp32, and some passes over both gradients. On a CPU
    this is as much as four to eight training steps. It takes the memory of one more set of parameters and two of
    gradients, and waits for the device. A lost gradient takes up to six more samples, for at most eight causes in a
    run. Between samples there is no cost, and a fused optimizer still unscales, clips and steps in one pass. Up to the
    first applied step, the count of steps is read back. Do not sample every step.
    """

    def __init__(self, every_n_steps: int = 100, *, by: RowsBy = "module") -> None:
        require_count("every_n_steps", every_n_steps)
        require_choice("by", by, ("module", "parameter"))
        self.every_n_steps = every_n_steps
        self.by: RowsBy = by
        super().__init__()

    @override
    def _forget(self) -> None:
        super()._forget()
        self.table, self._verdict, self._runs = GradientTable(), "", True
        self._next_step, self._largest, self._last_scale = 0, 0.0, math.inf
        self._found: dict[tuple[str, bool, bool, float | None], str] = {}  # what was tried against a lost gradient

    @property
    def recommended_scale(self) -> float | None:
        """Return the power of two that leaves the largest gradient so far 2 bits of room; `None` before a sample.

        It is meant for `DynamicLossScaler(init_scale=...)` and lies within the default limits of that class, 2**-14 to
        2**24. If it is below 1, the loss itself is too large: divide it by a constant.
        """
        return fitting_scale(self._largest) if self._largest > 0 else None

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw a heat map over modules and steps: the 15 worst rows at most, by their worst step. Dark red is bad.

        It shows the headroom of a run in fp16, and the SQNR of other runs.

        Args:
            path: Path or URL to also save the picture to.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (`pip install matplotlib`).
        """
        return self.table.plot(path)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reason = no_mixed_precision(trainer) or why_not_twice(trainer, pl_module, "training_step", against_fp32=True)
        self._runs = not self._stand_aside(reason)
        self._first_scale = _scale(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._runs and trainer.global_step >= self._next_step and (self._next_step or self._is_settled(trainer)):
            self._sample(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._runs or len(self.table.last) != len(self.table):  # there are several samples
            return
        goes_on = not trainer.is_last_batch or trainer.current_epoch + 1 != trainer.max_epochs
        if trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step or not goes_on:
            self._sample(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._verdict:
            _messages.info(self._verdict)
        self._verdict = ""  # a second fit has its own samples

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = [list(row) for row in self.table]
        return {"rows": rows, "largest": self._largest, "next_step": self._next_step, "verdict": self._verdict}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "GradientMonitor")
        largest, next_step = saved.number("largest"), saved.count("next_step")
        rows, verdict = saved.rows("rows", GradientRow), str(saved.any("verdict"))
        self.table, self._largest, self._next_step, self._verdict = GradientTable(rows), largest, next_step, verdict

    # -- work ----------------------------------------------------------------------------------------------------------

    def _sample(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Use the next multiple, so that a resumed run samples the same steps.
        self._next_step = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps
        sampler = GradientSampler(trainer, module, batch, batch_idx, self.by, partial(self._report_failure, trainer))
        sample = sampler.take(_scale(trainer))
        if sample is None:
            return
        total = sample.rows[-1]
        if math.isfinite(total.largest):
            self._largest = max(self._largest, total.largest)
        metrics = {UNDERFLOW_FRACTION: total.underflow_fraction, HEADROOM_BITS: total.headroom_bits}
        if not math.isnan(total.sqnr_db):
            metrics[GRADIENT_SQNR_DB] = total.sqnr_db
        log_metrics(trainer, metrics)
        self._judge(trainer, sample, sampler)
        self.table.add(sample.rows)

    def _report_failure(self, trainer: Trainer, failure: Failure) -> None:
        self._runs = failure.out_of_memory or trainer.world_size > 1  # the other ranks wait for this rank's figures
        then = "Its batch is left out" if self._runs else "It is off for the rest of this run"
        self._warn_of_failure(trainer, failure.reason, f"{failure.text}. {then}, training goes on")

    def _judge(self, trainer: Trainer, sample: GradientSample, sampler: GradientSampler) -> None:
        """Try a setting against a new fault of the sample, and keep the words for the end of the fit."""
        bad, found, total = sample.bad(), "", sample.rows[-1]
        # because gradients of other batches overflowed, and not because the backward carries no scale
        fell = self._first_scale > total.scale == vars(trainer.precision_plugin)["scaler"].get_scale()
        scale = min(fitting_scale(self._largest, highest=96), total.scale if fell else math.inf)
        if bad and sample.too_short is None and math.isfinite(total.largest):
            # if the backward overflows, another scale may fit by now
            fitting = scale if math.isnan(total.sqnr_db) and sample.forward_is_finite else None
            key = bad[0].name, bad[0].rounds_to_zero, sample.forward_is_finite, fitting
            if key not in self._found and len(self._found) < _MAX_CAUSES:
                self._found[key] = lost_in_training(trainer, sample, sampler, scale)
            found = self._found.get(key, "")
        verdict = describe_gradient(sample, None if fell else self.recommended_scale, found, self.table.last)
        is_sure = bool(self.table and GradientSample(self.table.last).too_short and sample.too_short)
        if is_sure and self._is_news("length"):  # the whole run is lost: do not wait for its end
            _messages.info(verdict)
        self._verdict = "" if is_sure else verdict

    def _is_settled(self, trainer: Trainer) -> bool:
        """Return whether a step was applied, or waiting takes too long. This waits for the device."""
        before, self._last_scale = self._last_scale, _scale(trainer)
        return trainer.global_step > _PATIENCE or (trainer.global_step > 0 and self._last_scale >= before)


def _scale(trainer: Trainer) -> float:
    plugin = trainer.precision_plugin
    scaler, last = getattr(plugin, "scaler", None), getattr(plugin, "last_step", None)
    # a plain `loss.backward()` in manual optimization does not use the scale; a scale of 1 becomes 2 or less
    is_used = last is None or (last.precision, last.scale) != ("fp16", 1.0) or last.next_scale <= 2
    return scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and is_used else 1.0
