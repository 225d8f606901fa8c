"""`MetricComparison`: what mixed precision costs, in the user's own validation metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_amp import _compat, _messages
from lightning_amp.callbacks._comparison_settings import (
    checked_every_n_epochs,
    checked_limit,
    checked_on_exceed,
    checked_tolerance,
)
from lightning_amp.callbacks._comparison_table import ComparisonRow, ComparisonTable
from lightning_amp.callbacks._copying import is_out_of_memory
from lightning_amp.callbacks._paired_validation import PairedValidation
from lightning_amp.callbacks._trainers import require_lightning_trainer, why_not_twice
from lightning_amp.scaling import Saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FP32_PREFIX = "amp/fp32/"
DIFF_PREFIX = "amp/diff/"

# Lightning takes these two, when a user logs them, for the axes of the plots.
_AXES = ("step", "epoch")

# The others compute in one low or high precision throughout: there is no fp32 to compare with.
_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


class MetricComparison(Callback):
    """Measures what mixed precision costs in the metrics that you log in validation.

    In a compared validation each batch is also run through a shadow of the module in true fp32: the same weights, the
    same batches, the same random draws, but autocast and TF32 off. Every metric that the module logs with
    `on_epoch=True` is then compared, after Lightning's own weighting and reduction:

    | key | value |
    |---|---|
    | `amp/fp32/<metric>` | the metric in fp32 |
    | `amp/diff/<metric>` | AMP minus fp32 |

    Both go to all loggers and to `trainer.callback_metrics` at `on_validation_end`; a callback that monitors them
    belongs after this one in the list of callbacks (`ModelCheckpoint` always is). `<metric>` is each name that
    `trainer.callback_metrics` has: `val_loss`, `val_loss_epoch`, `val_loss/dataloader_idx_1`. A logged `step` or
    `epoch` is an axis and not compared. `.table` has all rows.

    Training is bit-identical with and without it: the shadow shares the parameters and has its own buffers, metrics,
    lists, logger and trainer attributes. What user code does outside of the module (prints, files, global variables)
    happens twice in a compared validation. An attribute that cannot be copied (an open file, a generator) is left out
    of the shadow; if `validation_step` uses it, the callback says which one and stops comparing.

    Cost: the fp32 pass and one copy of buffers, metric states and other attributes per compared validation; in memory
    these, one batch, and the activations of one fp32 step. It does not stop the GPU between batches; at the end it
    reads each metric once, as Lightning does. Compiled modules run eagerly in the shadow. You do not want it in every
    epoch when validation takes a large part of the training time: use `every_n_epochs` or `limit_batches`.

    What it does not see: the hooks before the first batch (`on_validation_epoch_start`) run once, outside of autocast
    anyway, and the shadow takes over what they left. Metrics that callbacks log exist on one side only and are named
    in a warning. Another callback that draws random numbers or edits the batch in `on_validation_batch_start` should
    stand before this one. Modules that take a `dataloader_iter` are not compared.

    One device and DDP. On sharded strategies it says that it does not run. In DDP, values that are not reduced
    (`sync_dist=False`) are those of each rank, and rank 0 logs its own.

    Args:
        every_n_epochs: compare in every n-th validation epoch, that is in every n-th run of the validation loop: with
            `val_check_interval=0.5` there are two in each training epoch. The sanity check does not count;
            `trainer.validate()` always compares.
        limit_batches: compare over the first batches of each loader only: how many, or which share. Both sides are
            limited; the metrics that you log stay over all batches. With one loader the AMP side costs no further
            forward pass; with several, the limited batches of later loaders run once more in AMP as soon as one
            loader was cut short.
        tolerance: largest absolute difference to accept, in the unit of the metric: one number for all, or one for
            each metric. NaN on one side only always exceeds it. `None`: accept all.
        on_exceed: `"warn"`, or `"raise"` a `RuntimeError` at the end of the validation, on all ranks.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        *,
        limit_batches: int | float | None = None,
        tolerance: float | Mapping[str, float] | None = None,
        on_exceed: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        self.every_n_epochs = checked_every_n_epochs(every_n_epochs)
        self.limit_batches = checked_limit(limit_batches)
        self.tolerance = checked_tolerance(tolerance)
        self.on_exceed = checked_on_exceed(on_exceed)
        self._table = ComparisonTable(tolerance=self.tolerance)
        self._num_validations = 0
        self._begin_run()

    @property
    def table(self) -> ComparisonTable:
        """All values compared so far: rows of `epoch, step, metric, amp, fp32, diff, relative_diff`."""
        return self._table

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `.table` as CSV, with a header line. The file is replaced at once or not at all."""
        self._table.to_csv(path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the differences over epochs: one axis per metric, and the tolerance as a band. Needs matplotlib.

        Args:
            path: where to save the figure. Default: do not save it.
        """
        return self._table.plot(path)

    def state_dict(self) -> dict[str, Any]:
        """The table so far, in plain types."""
        return {"rows": [list(row) for row in self._table], "num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the table of a checkpoint."""
        saved = Saved(state_dict, "MetricComparison")
        num_validations = saved.count("num_validations")
        try:
            rows = [ComparisonRow(*row) for row in saved.entries("rows")]
        except TypeError as error:
            raise saved.wrong("rows", f"a list of rows of {len(ComparisonRow._fields)} values") from error
        self._table = ComparisonTable(rows, tolerance=self.tolerance)
        self._num_validations = num_validations

    # --- hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run; see whether this module, strategy and precision can be compared."""
        require_lightning_trainer(self, trainer)
        if stage not in ("fit", "validate"):
            return
        if not is_overridden("validation_step", pl_module):
            # Not a warning: nothing that this callback is for can ever happen in the run.
            raise ValueError(
                f"`MetricComparison` compares what is logged in validation, but `{type(pl_module).__name__}` has no"
                " `validation_step`. Define one, or remove the callback"
            )
        self._begin_run()
        if stage == "fit" and trainer.current_epoch == 0 and trainer.global_step == 0:
            self._table = ComparisonTable(tolerance=self.tolerance)
            self._num_validations = 0
        reason = _why_not(trainer, pl_module)
        if reason is not None:
            self._runs = False
            _messages.warn(f"`MetricComparison` does not run: {reason}.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if there will be nothing to compare."""
        if self._runs and not trainer.enable_validation:
            _messages.warn(
                "`MetricComparison` has nothing to compare: no validation runs in this fit. Give the trainer a"
                " validation loader, and a `limit_val_batches` other than 0."
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this validation is compared."""
        self._close()
        if trainer.sanity_checking or not self._runs:
            return
        if trainer.state.fn == "fit":
            self._num_validations += 1
            if self._num_validations % self.every_n_epochs:
                return
        self._current = PairedValidation(trainer, pl_module, self.limit_batches, partial(self._report, trainer))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run the batch in fp32, before the real run may edit it."""
        if self._current is not None and self._current.running:
            self._current.run_batch(batch, batch_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the random generators for the shadow's `on_validation_epoch_end`."""
        if self._current is not None and self._current.running:
            self._current.remember_random_state()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare and log. Only now do the AMP values of `on_validation_epoch_end` exist."""
        current, self._current = self._current, None
        if current is None:
            return
        sides = current.finish()
        self._runs = not current.failed_for_good
        if sides is not None:
            self._compare(trainer, *sides)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last comparison as a text table."""
        if self._table:
            _messages.info(f"MetricComparison, epoch {self._table[-1].epoch}:\n{self._table}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free the shadow."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free the shadow."""
        self._close()

    def _close(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = None

    def _begin_run(self) -> None:
        self._runs = True
        self._current: PairedValidation | None = None
        self._warned: set[str] = set()
        self._names_checked = False

    def _report(self, trainer: Trainer, error: Exception) -> None:
        """Say, on the rank where it happened, what ended a comparison; once per run."""
        if is_out_of_memory(error):
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            kind = "out of memory"
            text = (
                f"out of memory in the fp32 pass of epoch {trainer.current_epoch}: this comparison is dropped, training"
                " goes on, and the next comparison tries again. A smaller validation batch needs less"
            )
        else:
            kind = "error"
            last_line = (str(error).strip().splitlines() or [""])[-1]
            text = (
                f"the module's validation could not be run a second time ({type(error).__name__}: {last_line})."
                " Comparisons are off for the rest of this run, training goes on"
            )
        if self._is_news(kind):
            _messages.warn_on_this_rank(f"`MetricComparison` on rank {trainer.global_rank}: {text}.")

    def _is_news(self, kind: str) -> bool:
        if kind in self._warned:
            return False
        self._warned.add(kind)
        return True

    def _compare(self, trainer: Trainer, amp: dict[str, float], fp32: dict[str, float]) -> None:
        one_sided = sorted(amp.keys() ^ fp32.keys())
        if one_sided and self._is_news("one side"):
            _messages.warn(
                f"`MetricComparison`: logged on one side only and not compared: {', '.join(one_sided)}. A callback logs"
                " them, or the module does so depending on a value."
            )
        self._check_tolerance_names(trainer, amp, fp32)
        names = [name for name in amp if name in fp32 and name not in _AXES]
        metrics: dict[str, torch.Tensor] = {}
        device = trainer.strategy.root_device
        for name in names:
            # float64 does not exist on all devices
            metrics[FP32_PREFIX + name] = torch.tensor(fp32[name], dtype=torch.float32, device=device)
            metrics[DIFF_PREFIX + name] = torch.tensor(amp[name] - fp32[name], dtype=torch.float32, device=device)
        _compat.add_callback_metrics(trainer, metrics)
        step = _compat.log_evaluation_metrics(trainer, metrics, amp.get("step"))
        rows = [ComparisonRow.of(trainer.current_epoch, step, name, amp[name], fp32[name]) for name in names]
        self._table.extend(rows)
        if trainer.state.fn != "fit":
            _messages.info(f"MetricComparison, epoch {trainer.current_epoch}:\n{self._table}")
        self._judge(trainer, rows)

    def _check_tolerance_names(self, trainer: Trainer, amp: dict[str, float], fp32: dict[str, float]) -> None:
        if not isinstance(self.tolerance, Mapping) or self._names_checked:
            return
        self._names_checked = True
        available = sorted((amp.keys() | fp32.keys()).difference(_AXES))
        unknown = sorted(self.tolerance.keys() - set(available))
        # A metric that is logged on rank 0 only is unknown to the others.
        if trainer.strategy.reduce_boolean_decision(bool(unknown), all=True):
            raise ValueError(
                f"`tolerance` names metrics that validation does not log: {unknown}. Choose from {available}"
            )

    def _judge(self, trainer: Trainer, rows: list[ComparisonRow]) -> None:
        if self.tolerance is None:
            return
        exceeding = [
            f"`{row.metric}`: AMP {row.amp:.6g}, fp32 {row.fp32:.6g}, difference {row.diff:+.3g}, tolerance"
            f" {tolerance:g}"
            for row in rows
            if (tolerance := self._table.tolerance_of(row.metric)) is not None and row.exceeds(tolerance)
        ]
        if not trainer.strategy.reduce_boolean_decision(bool(exceeding), all=False):
            return
        where = "; ".join(exceeding) or "on another rank"
        epoch = trainer.current_epoch
        text = f"`MetricComparison`: mixed precision costs more than the tolerance in epoch {epoch}: {where}"
        if self.on_exceed == "raise":
            raise RuntimeError(f"{text}. Keep sensitive modules in fp32, or raise the tolerance")
        _messages.warn(f"{text}.")


def _why_not(trainer: Trainer, pl_module: LightningModule) -> str | None:
    reason = why_not_twice(trainer, pl_module, "validation_step")
    if reason is None and trainer.precision_plugin.precision not in _PRECISIONS:
        reason = f"with precision {trainer.precision_plugin.precision!r} there is no fp32 to compare with"
    return reason
