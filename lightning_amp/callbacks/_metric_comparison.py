"""`MetricComparison`: measure the cost of mixed precision in the user's own metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import is_count, is_number, require, require_bool, require_choice, require_count
from lightning_amp._compat._names import LightningModule, Trainer, is_overridden
from lightning_amp.callbacks._observer import (
    Observer,
    add_callback_metrics,
    evaluation_names,
    log_evaluation_metrics,
    no_mixed_precision,
    why_not_twice,
)
from lightning_amp.causes import lost_in_evaluation, nonfinite_names
from lightning_amp.findings import WRONG_DB, ComparisonRow, LostPrecision, ModuleRow
from lightning_amp.reports import ComparisonTable, ModuleTable, describe_both, describe_comparison, describe_difference
from lightning_amp.scaling import Saved
from lightning_amp.shadow import PairedEvaluation, gather

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FP32_PREFIX = "amp/fp32/"
DIFF_PREFIX = "amp/diff/"
ABS_DIFF_PREFIX = "amp/abs_diff/"

_AXES = {"step", "epoch"}
"""Lightning uses these two names, if a user logs them, as axes of the plots."""


_MAX_SEARCHES = 3
"""The number of searches without a result after which a run stops searching."""

OnExceed = Literal["warn", "raise"]


@final
class MetricComparison(Observer):
    """Measures how mixed precision changes the metrics that you log in validation and test.

    .. code-block:: python

        comparison = MetricComparison(tolerance={"val_loss": 0.5})
        trainer = L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison], max_epochs=1)
        trainer.fit(model, data)
        print(comparison.table)

    In a compared validation each batch also runs through a shadow, a copy of the module in true fp32. The shadow has
    the same weights, batches and random draws, but autocast and TF32 are off. Every metric that the module logs with
    `on_epoch=True` is then compared, after Lightning's own weighting and reduction:

    - `amp/fp32/<metric>`: the metric in fp32
    - `amp/diff/<metric>`: AMP minus fp32
    - `amp/abs_diff/<metric>`: its magnitude, to monitor (`mode="min"` on a difference finds the most negative)

    All go to all loggers and to `trainer.callback_metrics` at `on_validation_end`. A callback that monitors them
    belongs after this one in the list of callbacks (`ModelCheckpoint` always is). Between two comparisons
    `trainer.callback_metrics` keeps the values of the last one, after a resume the values of the checkpoint. They are
    NaN as long as no comparison worked. `<metric>` is each name that `trainer.callback_metrics` has: `val_loss`,
    `val_loss_epoch`, `val_loss/dataloader_idx_1`. A logged `step` or `epoch` is an axis and not compared.

    `trainer.validate()` and `trainer.test()` compare too. `.table` has the rows of all comparisons. One line at the end
    names the metric that differs most, or each one that is NaN or infinite in mixed precision only.

    The callback looks for the module to blame, once per run, if a metric exceeds `tolerance` or is off by a quarter. It
    looks once more if a metric is not finite where fp32 is. It runs the first batches of the evaluation again in both
    precisions. One warning names the module whose output is furthest from fp32, although its inputs are close. It says
    whether `fp32_modules=[module]` and `eval_precision="fp32"` helped in a trial. :attr:`report` has the same as data.

    Training is bit-identical with and without the callback: the shadow has its own parameters, buffers, metrics, lists,
    logger and trainer attributes. User code outside of the module (prints, files, global variables) runs twice in a
    compared validation. If `validation_step` uses an attribute that cannot be copied (an open file, a generator), the
    callback names it and stops comparing. Forward hooks run in the shadow too, because they may change its results.
    Weights, buffers and batches in half precision are upcast for the fp32 side; there, casts to half precision in your
    code (`x.bfloat16()`) leave float32. A note names the first one: a run with `precision="32-true"` keeps them.

    Cost: a compared validation takes the fp32 pass and one copy of parameters, buffers, metric states and other
    attributes. It holds these, copies of the first 8 batches of each loader (up to 256 MiB), and the activations of one
    fp32 step in memory. It does not stop the GPU between batches; at the end it reads each metric once, as Lightning
    does. Compiled modules run eagerly in the shadow. You do not want it in every epoch when validation takes a large
    part of the training time: use `every_n_epochs` or `limit_batches`.

    Limits: hooks before the first batch (`on_validation_epoch_start`) run once, outside of autocast; the shadow takes
    over the state after them. Metrics that callbacks log exist on one side only and are named in a warning. Another
    callback that draws random numbers or edits the batch in `on_validation_batch_start` should stand before this one.
    A step that draws random numbers in half precision (`torch.randn_like` of an activation) draws different numbers in
    float32, at least on the CPU. Modules that take a `dataloader_iter` are not compared.

    Without mixed precision, a `validation_step` or a validation, the callback does nothing and logs a line. It works on
    one device and in DDP. With FSDP and tensor parallelism the module itself runs a second time instead of a copy. Each
    rank has its own values if they are not reduced (`sync_dist=False`), and rank 0 logs its own.

    Args:
        every_n_epochs: Compare in the first validation of a fit and in every n-th run of the validation loop. With
            `val_check_interval=0.5` there are two runs in each training epoch. The sanity check does not count; a
            resumed fit continues to count; `trainer.validate()` and `trainer.test()` always compare.
        limit_batches: Compare over the first batches of each loader only: their number, or their share. Both sides are
            limited; the metrics that you log still cover all batches. With one loader the AMP side costs no further
            forward pass. With several, the limited batches of later loaders run once more in AMP after one loader was
            cut short.
        tolerance: Largest absolute difference to accept, in the unit of the metric. It is one number for all, or a
            mapping with one number for each metric of validation and test. NaN on one side only always exceeds it.
            `None` accepts all. A name that the first comparison does not log is an error.
        on_exceed: `"warn"`, or `"raise"` a `RuntimeError` at the end of the validation, on all ranks.
        by_module: Also compare the outputs of each module, over all compared batches: :attr:`module_table`. It costs a
            copy of all activations of one fp32 step, and some passes over them. Compiled modules are left out.

    Attributes:
        table: All values compared so far, in rows of `epoch, step, metric, amp, fp32, diff, relative_diff`.
        module_table: The outputs of modules compared so far; empty without `by_module=True`.
        report: The module to blame for a metric that went wrong, and what was tried; `None` if none did so far.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        *,
        limit_batches: int | float | None = None,
        tolerance: float | Mapping[str, float] | None = None,
        on_exceed: OnExceed = "warn",
        by_module: bool = False,
    ) -> None:
        require_count("every_n_epochs", every_n_epochs)
        is_share = isinstance(limit_batches, float) and 0.0 < limit_batches <= 1.0
        rule = "an integer of at least 1 (batches), a float in (0, 1] (share of the batches) or `None`"
        advice = "Leave it out to compare over all batches."
        fine = limit_batches is None or is_count(limit_batches) or is_share
        require(fine, "limit_batches", rule, limit_batches, advice)
        numbers: Any = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"": tolerance}
        fine = all(isinstance(k, str) and is_number(v, finite=False) and v >= 0 for k, v in numbers.items())
        rule = "a number of at least 0, a mapping from metric names to such numbers or `None`"
        require(fine, "tolerance", rule, tolerance, "It is absolute, in the unit of the metric.")
        require_bool("by_module", by_module)
        require_choice("on_exceed", on_exceed, ("warn", "raise"), '"warn" lets training go on.')
        self.every_n_epochs = every_n_epochs
        self.limit_batches = limit_batches
        self.tolerance = dict(tolerance) if isinstance(tolerance, Mapping) else tolerance
        self.on_exceed: OnExceed = on_exceed
        self.by_module = by_module
        super().__init__()
        self._begin_run()

    @override
    def _forget(self) -> None:
        super()._forget()
        self.table = ComparisonTable(tolerance=self.tolerance)
        self.module_table = ModuleTable()
        self._num_validations = self._num_searches = 0
        self.report: LostPrecision | None = None

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `.table` as CSV, with a header line, to a path or a URL. The file appears whole or not at all."""
        self.table.to_csv(path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw each metric over steps, in AMP and fp32, and the difference, as `table.plot` does."""
        return self.table.plot(path)

    @override
    def state_dict(self) -> dict[str, Any]:
        rows, module_rows = ([list(row) for row in table] for table in (self.table, self.module_table))
        return {"rows": rows, "module_rows": module_rows, "num_validations": self._num_validations}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "MetricComparison")
        num_validations, module_rows = saved.count("num_validations"), saved.rows("module_rows", ModuleRow)
        self.table = ComparisonTable(saved.rows("rows", ComparisonRow), tolerance=self.tolerance)
        self.module_table, self._num_validations = ModuleTable(module_rows), num_validations
        self._resumed = bool(self.table)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage not in ("fit", "validate", "test"):
            return
        self._begin_run()
        step = "test_step" if stage == "test" else "validation_step"
        missing = f"`{type(pl_module).__name__}` has no `{step}`, in which it would compare what is logged"
        missing = None if is_overridden(step, pl_module) else missing
        reason = no_mixed_precision(trainer) or missing or why_not_twice(trainer, pl_module, step, against_fp32=True)
        if reason is None and stage == "fit" and not trainer.enable_validation:
            reason = "no validation runs in this fit"
        self._runs = not self._stand_aside(reason)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed:  # callbacks that read a value before this run's first comparison find the previous values
            add_callback_metrics(trainer, _as_metrics(trainer, self.table.last))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        if trainer.sanity_checking or not self._runs:
            return
        if trainer.state.fn == "fit":
            is_first, self._is_first = self._is_first and not self._resumed, False
            self._num_validations += 1
            if self._num_validations % self.every_n_epochs and not is_first:
                return
        stage = "test" if trainer.testing else "validation"
        warn = lambda failure: self._warn_of_failure(trainer, failure.reason, failure.text)  # noqa: E731
        self._current = PairedEvaluation(trainer, pl_module, stage, self.limit_batches, warn, by_module=self.by_module)

    on_test_start = on_validation_start

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._current is not None and self._current.running:
            self._current.run_batch(batch, batch_idx)  # copied before the real run can edit the batch

    on_test_batch_start = on_validation_batch_start

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if self._current is not None:
            self._current.end_batch()

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._current is not None and self._current.running:
            self._current.remember_random_state()  # the shadow calls its hook of this name

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The AMP values that the epoch-end hook logs exist only now.
        current, self._current = self._current, None
        if current is None:
            return
        is_complete, self._runs = current.finish(), not current.failed_for_good
        if is_complete:
            self._compare(trainer, pl_module, current)
        elif trainer.state.fn == "fit":
            # A callback that monitors a difference must not end a run whose comparison failed.
            names = evaluation_names(trainer) - _AXES
            unknown = _as_metrics(trainer, [ComparisonRow.of(0, 0, name, math.nan, math.nan) for name in names])
            add_callback_metrics(trainer, unknown | trainer.callback_metrics)

    on_test_end = on_validation_end

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.table:
            _messages.info(describe_comparison(self.table.last, self.report) + self._note)

    # -- work ----------------------------------------------------------------------------------------------------------

    @override
    def _close(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = None

    def _begin_run(self) -> None:
        self._runs = self._is_first = True
        self._resumed, self._note = False, ""
        self._current: PairedEvaluation | None = None
        self._said.clear()

    def _compare(self, trainer: Trainer, module: LightningModule, compared: PairedEvaluation) -> None:
        amp, fp32, epoch = compared.amp, compared.fp32, trainer.current_epoch
        self._note = "".join(f"\n  note: {one}" for one in compared.notes)
        if self.by_module:
            sums = compared.modules.items()
            self.module_table.add(ModuleRow.of(epoch, trainer.global_step, name, one) for name, one in sums)
        if amp.keys() != fp32.keys() and self._is_news("one side"):
            _messages.warn(
                "`MetricComparison`: logged on one side only and not compared:"
                f" {', '.join(sorted(amp.keys() ^ fp32.keys()))}. A callback logs them, or the module does so depending"
                " on a value."
            )
        self._check_names(trainer, module, sorted((amp.keys() | fp32.keys()) - _AXES))
        names = [name for name in amp if name in fp32 and name not in _AXES]
        rows = [ComparisonRow.of(epoch, 0, name, amp[name], fp32[name]) for name in names]
        if not rows and self._is_news("nothing"):
            _messages.warn("`MetricComparison` has nothing to compare: nothing was logged with `on_epoch=True`.")
        if rows:
            metrics = _as_metrics(trainer, rows)
            add_callback_metrics(trainer, metrics)
            step = log_evaluation_metrics(trainer, metrics, amp.get("step"))
            self.table.add(row._replace(step=step) for row in rows)
        self._judge(trainer, module, compared, is_new=bool(rows))
        if rows and trainer.state.fn != "fit":
            _messages.info(describe_comparison(self.table.last, self.report) + self._note)

    def _check_names(self, trainer: Trainer, module: LightningModule, logged: list[str]) -> None:
        """Raise for names in `tolerance` that the first comparison does not log. All ranks must call this."""
        if not isinstance(self.tolerance, Mapping) or not self._is_news("names"):
            return
        wanted, step = set(self.tolerance), "validation_step" if trainer.testing else "test_step"
        if is_overridden(step, module):  # one tolerance serves validation and test
            wanted = {name for name in wanted if ("test" in name.lower()) == trainer.testing}
        unknown = sorted(wanted.difference(logged))
        # The other ranks do not have a metric that is logged on rank 0 only.
        if trainer.strategy.reduce_boolean_decision(bool(unknown), all=True):
            raise ValueError(f"`tolerance` names metrics that are not logged: {unknown}. Choose from {logged}.")

    def _judge(self, trainer: Trainer, module: LightningModule, compared: PairedEvaluation, *, is_new: bool) -> None:
        """Warn of a metric that went wrong, once with its module, or raise. All ranks must call this."""
        ranks = gather(trainer, (self.table.suspect(), self.table.exceeding()) if is_new else (None, ""))
        row = next((row for row, _ in ranks if row is not None), None)
        exceeding = next((text for _, text in ranks if text), "")
        if row is None:
            return
        searches = (row.is_broken and self._is_news("broken")) or self._num_searches < _MAX_SEARCHES
        if not (exceeding or searches):
            return
        self._num_searches += searches
        report = None
        if not exceeding and not math.isfinite(row.fp32):
            names = nonfinite_names(trainer, module, [one.batch for one in compared.kept])
            text = describe_both(row, names, len(compared.kept), compared.num_batches)
        else:
            report = lost_in_evaluation(trainer, module, compared, row) if searches else None
            is_certain = report is not None and report.output_sqnr_db < WRONG_DB and any(t.works for t in report.tried)
            if not exceeding and not is_certain and math.isfinite(row.amp):
                return
            text = describe_difference(row, exceeding, report, searches)
        self.report, self._num_searches = report or self.report, _MAX_SEARCHES
        if exceeding and self.on_exceed == "raise":
            raise RuntimeError(text + self._note)
        _messages.warn(text + self._note)


def _as_metrics(trainer: Trainer, rows: Sequence[ComparisonRow]) -> dict[str, torch.Tensor]:
    """Return three values for each row, as `trainer.callback_metrics` holds them."""
    device, metrics = trainer.strategy.root_device, dict[str, float]()
    for row in rows:
        values = {FP32_PREFIX: row.fp32, DIFF_PREFIX: row.diff, ABS_DIFF_PREFIX: abs(row.diff)}
        metrics |= {prefix + row.metric: value for prefix, value in values.items()}
    # Some devices have no float64.
    return {key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in metrics.items()}
