"""`GradientMonitor`: do the gradients fit into fp16 or fp8, and how close are they to those of fp32?"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import require_choice, require_count
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._text import exact
from lightning_amp.callbacks._first_step import FirstStep
from lightning_amp.callbacks._trainers import log_metrics, require_lightning_trainer, why_not_twice
from lightning_amp.causes.gradient import GradientSearch
from lightning_amp.findings import TOTAL, GradientRow
from lightning_amp.numerics import ExponentHistogram, fitting_scale
from lightning_amp.reports import (
    MAX_ROWS,
    GradientTable,
    Quantity,
    describe_derivative,
    describe_fault,
    describe_healthy,
)
from lightning_amp.scaling import Saved
from lightning_amp.shadow import Failure, RowsBy, Sample, take_sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNDERFLOW_FRACTION = "amp/underflow_fraction"
HEADROOM_BITS = "amp/headroom_bits"
GRADIENT_SQNR_DB = "amp/gradient_sqnr_db"
FP8_UNDERFLOW_FRACTION = "amp/fp8_underflow_fraction"


@final
class GradientMonitor(Callback):
    """Shows whether gradients fit into fp16, and how far mixed precision moves them.

    .. code-block:: python

        monitor = GradientMonitor(every_n_steps=100)
        trainer = L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[monitor], max_epochs=1)
        trainer.fit(model, data)
        print(monitor.table)
        print(monitor.recommended_scale)  # for `DynamicLossScaler(init_scale=...)`

    Every so many steps the batch is run twice more, forward and backward, on copies of the module: once in true fp32
    (without autocast, TF32 and casts to half precision by hand), once as training runs it; with the same weights and
    random numbers. The first gives the true gradients, the second what mixed precision makes of them.

    ========================== =====================================================================================
    key                        value, at every sampled step, over all parameters
    ========================== =====================================================================================
    `amp/underflow_fraction`   share of the non-zero true gradients that the current scale does not save from becoming
                               zero in fp16
    `amp/headroom_bits`        how often the scale could be doubled before the largest gradient (of a parameter or of a
                               module's output) leaves fp16: log2(65504 / largest scaled gradient); negative: it has.
                               Gradients inside of `torch.autograd.grad` do not count: the scale does not multiply them
    `amp/gradient_sqnr_db`     signal to noise of the mixed-precision gradient against fp32: 6 dB are one correct bit.
                               Left out where it overflowed
    ========================== =====================================================================================

    In small networks fp16 gradients have some 65 dB and bf16 gradients some 45, in deep ones less; at 20 dB the noise
    is a tenth of the gradient. fp8 gradients have 18 to 35. In an fp8 run the table shows instead of fp16's limits, for
    each layer in fp8, what its cast to 8 bits loses of the true gradients that reach it: the share that becomes zero
    (over all layers it is logged, as `amp/fp8_underflow_fraction`), and the share that is saturated.

    :attr:`table` has the same per module, :meth:`plot` draws it as a heat map, :attr:`histograms` counts exponents and
    :attr:`recommended_scale` is what to start `DynamicLossScaler` with. It works in every precision; what is printed of
    a bf16 or fp32 run says nothing of fp16: there :attr:`recommended_scale` and `table.to_text(fp16=True)` tell whether
    fp16 would do, at the scale 1 that these use. In DDP each rank looks at the gradients of its own batch, before they
    are averaged; the figures are over the values of all ranks, and the same on each. The run is
    bit-identical to one without; what user code does outside of the module (prints, files, global variables) happens
    again in a sampled step. What `torch.compile` compiled runs eagerly in it; of modules that TorchScript compiled only
    the gradients of parameters are seen. (A TorchScript *function* that the module does not hold is optimized from its
    second run on, and the sample is its first: the first training step may differ from one without in its last bits.)

    Args:
        every_n_steps: Optimizer steps between two samples: every multiple is sampled, and first of all the step that
            follows the first applied one, when the scale has settled and layers that begin at zero have moved. With
            accumulation the first batch of the step stands for it.
        by: Rows of the table: `"module"` or `"parameter"`.

    Raises:
        ValueError: If an argument is out of its range.

    The last line, at the end of fit, reads the table: where the gradient is below 10 dB it names the module that is the
    first in the backward to lose its own, with what (overflow, zero, rounding), and what helps. That was tried: for a
    new cause the batch is run with one setting after the other (a scale, `fp32_modules`, bf16), and again in fp32. Two
    faults of `training_step` itself are one warning each, with the line: clipping gradients while they are multiplied
    with the loss scale (:func:`~lightning_amp.precision.unscale_`), and `torch.autograd.grad(create_graph=True)` of
    fp16 values that do not fit (:func:`~lightning_amp.precision.scaled_grad`).

    Cost: a sampled step is one more step forward and backward, one in fp32, and some passes over both gradients: as
    much as four to eight training steps on a CPU. It takes the memory of one more set of parameters and two of
    gradients, and it waits for the device. A cause that is new takes up to nine more, once (of eight causes at most).
    Between them nothing: no hook of it is in the way of the folded optimizer step; up to the first applied step the
    count of steps is read back. You do not want it in every step.
    """

    def __init__(self, every_n_steps: int = 100, *, by: RowsBy = "module") -> None:
        require_count("every_n_steps", every_n_steps)
        require_choice("by", by, ("module", "parameter"))
        self.every_n_steps = every_n_steps
        self.by: RowsBy = by
        self._last_trainer = LastTrainer()
        self._forget()

    def _forget(self) -> None:
        self._table = GradientTable()
        self._histograms: dict[str, ExponentHistogram] = {}
        self._largest = 0.0
        self._next_step = 0
        self._runs = True
        self._said_unseen = self._said_clipped = False
        self._verdict = ""
        self._search = GradientSearch()
        self._first = FirstStep()

    @property
    def table(self) -> GradientTable:
        """Return the rows of all samples: `step, name, scale, num_values, ...`. Prints the latest."""
        return self._table

    @property
    def histograms(self) -> dict[str, ExponentHistogram]:
        """Return the exponents of the true gradients of the latest sample, by row. Not in the checkpoint."""
        return dict(self._histograms)

    @property
    def recommended_scale(self) -> float | None:
        """Return the power of two that leaves the largest gradient so far 2 bits of room; `None` before a sample.

        For `DynamicLossScaler(init_scale=...)`; inside its default limits, 2**-14 to 2**24. Below 1 the loss itself is
        too large: better divide it by a constant.
        """
        return fitting_scale(self._largest) if self._largest > 0 else None

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        quantity: Quantity = "headroom_bits",
        max_rows: int | None = MAX_ROWS,
    ) -> Figure:
        """Draw a heat map over modules and steps.

        Args:
            path: Where to save the picture too, also a URL.
            quantity: `"headroom_bits"` (red: overflows, white: just fits, pale blue: room), `"underflow_fraction"`,
                `"subnormal_fraction"`, `"sqnr_db"`, `"cosine"` or `"fp8_underflow_fraction"`.
            max_rows: Draw only so many rows, the worst by their worst step. `None` draws all.

        Raises:
            ModuleNotFoundError: Without matplotlib (`pip install matplotlib`).
            ValueError: For another quantity, or number of rows.
        """
        return self._table.plot(quantity, path, max_rows=max_rows)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_lightning_trainer(self, trainer)
        if stage == "fit" and not self._last_trainer.goes_on(trainer):  # before a checkpoint is restored
            self._forget()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = FirstStep()
        reason = why_not_twice(trainer, pl_module, "training_step", against_fp32=True)
        self._runs = reason is None
        if reason is not None:
            _messages.info(f"`GradientMonitor` does not run: {reason}.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < self._next_step or not self._runs:
            return
        if self._next_step == 0 and not self._first.is_applied(trainer):
            return
        self._sample_now(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A fit that ends before there is a batch after the first applied step, or in which none is.
        if self._runs and self._next_step == 0 and not self._first.can_wait(trainer):
            self._sample_now(trainer, pl_module, batch, batch_idx)

    def _sample_now(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # The next multiple: a resumed run samples the same steps.
        self._next_step = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps
        self._sample(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = next((row for row in self._table.last if row.name == TOTAL), None)
        if last is not None:
            _messages.info(
                f"GradientMonitor, step {last.step}, loss scale {exact(last.scale)}:\n{self._table}\n"
                f"{self._verdict}".rstrip()
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = [list(row) for row in self._table]
        return {"rows": rows, "largest": self._largest, "next_step": self._next_step, "verdict": self._verdict}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()  # what an earlier fit left; `load_state_dict` follows if the checkpoint knows this callback

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "GradientMonitor")
        largest, next_step = saved.number("largest"), saved.count("next_step")
        rows, verdict = saved.rows("rows", GradientRow), str(saved.any("verdict"))
        self._table, self._largest, self._next_step = GradientTable(rows), largest, next_step
        self._verdict = verdict

    # -- work ----------------------------------------------------------------------------------------------------------

    def _sample(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else 1.0
        sample = take_sample(trainer, module, batch, batch_idx, self.by, scale, partial(self._report_failure, trainer))
        if sample is None:
            return
        if sample.unseen and not self._said_unseen:
            self._said_unseen = True
            names = ", ".join(f"`{name}`" for name in sample.unseen[:3]) + (", ..." if len(sample.unseen) > 3 else "")
            _messages.info(
                f"`GradientMonitor` does not see into {names}, compiled by TorchScript: gradients of parameters count,"
                " those of outputs do not."
            )
        self._table.add(sample.rows)
        self._histograms = sample.histograms
        total = sample.rows[-1]
        if math.isfinite(total.largest):
            self._largest = max(self._largest, total.largest)
        metrics = {UNDERFLOW_FRACTION: total.underflow_fraction, HEADROOM_BITS: total.headroom_bits}
        if not math.isnan(total.sqnr_db):
            metrics[GRADIENT_SQNR_DB] = total.sqnr_db
        if total.fp8_underflow_fraction is not None:
            metrics[FP8_UNDERFLOW_FRACTION] = total.fp8_underflow_fraction
        log_metrics(trainer, metrics)
        self._examine(trainer, module, batch, batch_idx, sample)

    def _report_failure(self, trainer: Trainer, failure: Failure) -> None:
        then = ": it is left out"
        if not failure.out_of_memory:
            self._runs = trainer.world_size > 1  # the others wait for this one's figures
            then = ". Its batch is left out" if self._runs else ". It is off for the rest of this run"
        who = f"`GradientMonitor` on rank {trainer.global_rank}"
        _messages.warn_on_this_rank(f"{who}: {failure.text}{then}, training goes on.")

    def _examine(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, sample: Sample) -> None:
        """Have it found out what the sample shows and what helps, and keep it in words."""
        scale, step = self.recommended_scale, sample.rows[-1].step
        found = self._search.examine(trainer, module, batch, batch_idx, self.by, sample, scale)
        if found.derivative is not None:
            text = describe_derivative(found.derivative, found.scaled_grad_helps)
            _messages.warn(f"`GradientMonitor`: {text}")
        if found.fault is None:
            self._verdict = describe_healthy(sample.rows, self._largest, scale)
            return
        faded = sample.rows[-1].largest / self._largest if self._largest > 0 else 1.0
        self._verdict = describe_fault(found.fault, found.tried, faded=faded)
        if found.fault.clipped:
            if not self._said_clipped:
                _messages.warn(f"`GradientMonitor`, step {step}: {self._verdict}")
            self._said_clipped = True
            self._verdict = "The gradient is clipped while it is multiplied with the loss scale: see the warning."
