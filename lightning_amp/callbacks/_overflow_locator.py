"""`OverflowLocator`: which layer, which batch, and what to change."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import require_count
from lightning_amp._compat import _modules
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._terminal import own_lines
from lightning_amp._urls import location
from lightning_amp.callbacks._early_checks import EarlyChecks
from lightning_amp.callbacks._trainers import log_metrics, require_lightning_trainer, why_not_twice
from lightning_amp.casting import Choice
from lightning_amp.causes.overflow import Explained, KnownCauses, ReportFiles, explain
from lightning_amp.findings import StepRecord
from lightning_amp.numerics import largest_finite, nonfinite_gradients, stack_scalars
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import OverflowReport, ScaleIs
from lightning_amp.scaling import Saved, Subscription
from lightning_amp.shadow import BatchWindow, gather
from lightning_amp.tracing import Diagnosis

OVERFLOWS = "amp/overflows"

_log = logging.getLogger(__name__)


@final
class OverflowLocator(Callback):
    """Finds out why a step was skipped: which module, which parameters, which batch.

    .. code-block:: python

        locator = OverflowLocator(max_reports=3)
        trainer = L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[locator], max_epochs=1)
        trainer.fit(model, data)
        for report in locator.reports:
            print(report.batch_idx, report.cause, report.diagnosis.module, report.diagnosis.operation)

    ================ =====================================================================
    key              value, at every log point
    ================ =====================================================================
    `amp/overflows`  optimizer steps skipped in this Trainer, those without a report too
    ================ =====================================================================

    After a skipped step it runs the batch again, on a copy of the module: same weights, batch, random numbers and
    scale; then in fp32; then with what may help. It then knows whether the batch, a weight, the forward of a module,
    the loss, or only the backward was not finite, in which operation and on which line, whether fp32 would do better,
    and what helps:

    .. code-block:: text

        OverflowLocator: step 7 was skipped: epoch 0, batch 7, loss scale 2**16
          cause: the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 ...
          line: losses.py:75 "log_z = torch.log(torch.exp(sim).sum(-1))"
          try: 'bf16', whose range is that of fp32 (tried: works); or ...

    What is "tried" made loss and gradients finite in a replay. A cause is printed once, and counted from then on. A
    step that is skipped while a dynamic scale settles is no fault: if a replay at a lower scale is finite, it is only
    counted. One line at the end has both counts.

    A loss that is not finite although its gradients are is reported once, in the same way; the step is taken.

    Before a step uses it, it names a learning rate, or another hyperparameter, that is not finite (on an accelerator at
    the next log point, or before the next report); the step is taken. It also names parameters and buffers that are not
    finite at the start, averages that are written into half-precision copies, and an `eps` that is zero in its
    optimizer's state. The error that ends a stuck run repeats the cause that was found.

    :attr:`reports` has the same as data. The run is bit-identical to one without: the copy has its own parameters,
    buffers, metrics, lists, logger and random generators, and it is gone after the replay. What user code does outside
    of the module (prints, files, global variables) happens twice for a skipped batch.

    With accumulation all batches since the last step are run again until one is not finite (as many of them as fit into
    256 MiB). In DDP all ranks look, each at its own batches, and tell each other: every rank that finds a cause is
    reported, with its number, and rank 0 logs and writes the files for all.

    What may differ in a replay: attributes of the module that its step changed (a counter, a schedule of its own); a
    batch that is edited in place (it is copied before each step, as soon as that was noticed once); weights that
    another optimizer changed in the same manual step. Callbacks that draw random numbers or edit the batch in
    `on_train_batch_start` should stand before this one in the list. The replay runs eagerly what `torch.compile`
    compiled, and sees nothing inside of modules that TorchScript compiled, which the report says. Only skips of
    :class:`~lightning_amp.AmpPrecision` can be seen; with another plugin it says so and does nothing.

    Args:
        max_reports: Stop looking after this many different causes, or 20 times as many skipped steps, in this Trainer;
            from then on it only counts. A resumed run goes on counting, and has the reports of its checkpoint.
        dirpath: Folder for one JSON file per report, `overflow_step00007_rank0.json`, or its URL (`"s3://bucket/run"`,
            as Lightning's callbacks take it). `None` writes none. If it cannot be written, one warning says so and
            training goes on. A file appears whole or not at all.
        save_bundles: Also saves `overflow_step00007_rank0.pt` there: weights, batch, random state and scale, for
            `lightning_amp.tracing.replay`. As large as the model. Needs `dirpath`.

    Raises:
        ValueError: If an argument is out of its range, or fsspec does not know the protocol of `dirpath`.
        ImportError: If the driver for `dirpath` is not installed.

    Cost: it needs to know of a skip at once, so that it reads the flag of each step: the host waits for the device once
    per batch; after the last report once per log point. Random states and a reference to the batch are kept: 0.1 to
    0.2 ms of host time. A report costs one or more steps and, for as long as it takes, the memory of one more set of
    parameters, gradients and activations; if there is not enough it says so and training goes on. You do not want it in
    a run that must not wait, once the model is known to be sound.
    """

    def __init__(
        self,
        *,
        max_reports: int = 10,
        dirpath: str | os.PathLike[str] | None = None,
        save_bundles: bool = False,
    ) -> None:
        require_count("max_reports", max_reports, least=0)
        if save_bundles and dirpath is None:
            raise ValueError("`save_bundles=True` needs a folder to save them in: pass `dirpath`.")
        self.max_reports = max_reports
        self.dirpath = None if dirpath is None else location(dirpath, "dirpath")
        self.save_bundles = bool(save_bundles)
        self._last_trainer = LastTrainer()
        self._forget()
        self._begin_fit()

    def _forget(self) -> None:
        self._causes = KnownCauses(self.max_reports)
        self._files = None if self.dirpath is None else ReportFiles(self.dirpath, self.save_bundles)
        self._num_overflows = 0

    def _begin_fit(self) -> None:
        self._plugin: AmpPrecision | None = None
        self._counting: Subscription | None = None
        self._looking: Subscription | None = None
        self._window = BatchWindow()
        self._steps: list[StepRecord] = []  # skipped, or taken with a loss that is not finite; not looked into yet
        self._num_attempted = 0
        self._steps_seen = 0
        self._largest_weight: float | None = None
        self._early_checks = EarlyChecks()

    @property
    def reports(self) -> list[OverflowReport]:
        """Return the reports of all fits of one Trainer, on at most `max_reports` skipped steps.

        The same on all ranks: one per step and rank that found a cause; of a step for which none did, that of rank 0.
        """
        return list(self._causes.reports)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_lightning_trainer(self, trainer)
        if stage == "fit":  # before a checkpoint is restored
            self._begin_fit()
            if not self._last_trainer.goes_on(trainer):
                self._forget()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = trainer.strategy.precision_plugin
        self._steps_seen = trainer.global_step
        self._warn(self._early_checks.before_fit(trainer, pl_module))
        if not isinstance(plugin, AmpPrecision):
            _messages.info(
                f"`OverflowLocator` has nothing to look at: the precision plugin {type(plugin).__name__} does not say"
                " which steps it skips. Use `plugins=[AmpPrecision(...)]`."
            )
            return
        look = partial(self._before_update, trainer)
        self._plugin = plugin
        self._counting = plugin.records.subscribe(self._count, before_update=look, cause=self._causes.since)
        reason = why_not_twice(trainer, pl_module, "training_step")
        if reason is not None:
            _messages.info(f"`OverflowLocator` counts, but does not look for causes: {reason}.")
        elif not self._causes.is_complete:
            self._looking = plugin.records.subscribe(self._receive, at_once=True, on_bad_loss=self._on_bad_loss)
            self._num_attempted = plugin.records.num_attempted
            if self._largest_weight is None:  # a resumed run has that of its first start
                self._largest_weight = _largest_weight(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._warn(self._early_checks.before_batch(trainer, steps_are_seen=self._plugin is not None))
        if self._is_looking:
            self._window.add(batch, batch_idx, trainer.strategy.root_device.type)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._plugin is None:
            return
        if self._is_looking:
            self._explain(trainer, pl_module)
        steps = trainer.global_step
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every > 0 and steps // every != self._steps_seen // every:
            self._plugin.records.flush()
            self._warn(self._early_checks.read_late(trainer))
            log_metrics(trainer, {OVERFLOWS: float(self._num_overflows)})
        self._steps_seen = steps

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warn(self._early_checks.read_late(trainer))
        if summary := self._causes.summary():
            _messages.info(f"OverflowLocator: {summary}.")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._plugin is not None:
            if not isinstance(exception, FloatingPointError):  # that one was raised while reading
                with contextlib.suppress(Exception):
                    self._plugin.records.flush()
            elif self._is_looking:  # the skip that was one too many: the plugin raised before the batch was over
                self._explain(trainer, pl_module)
        self._detach()  # Lightning calls no `teardown` after an exception

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        if self._counting is not None:
            self._counting.close()
        self._stop_looking()
        self._plugin = self._counting = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._plugin is not None:
            self._plugin.flush()  # closes what hooks have stepped since the last batch, and reads it
        state = {"num_overflows": self._num_overflows, **self._causes.state()}
        return state if self._largest_weight is None else {**state, "largest_weight": self._largest_weight}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()  # what an earlier fit left; `load_state_dict` follows if the checkpoint knows this callback

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "OverflowLocator")
        num_overflows, causes = saved.count("num_overflows"), KnownCauses(self.max_reports)
        causes.restore(saved, state_dict)
        largest_weight = saved.number("largest_weight") if "largest_weight" in state_dict else None
        self._num_overflows, self._causes, self._largest_weight = num_overflows, causes, largest_weight

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.close()
            self._looking = None
        self._window.clear()
        self._steps.clear()

    def _count(self, records: list[StepRecord]) -> None:
        self._num_overflows += sum(record.skipped for record in records)

    def _receive(self, records: list[StepRecord]) -> None:
        self._steps += [record for record in records if record.skipped]

    def _on_bad_loss(self, record: StepRecord) -> None:
        self._steps.append(record)
        if self._looking is not None:
            self._looking.end_losses()  # it is said once

    def _before_update(self, trainer: Trainer, step: int | None, optimizer: Optimizer) -> None:
        self._warn(self._early_checks.before_update(trainer, step, optimizer))

    def _explain(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._plugin is not None
        steps, self._steps = self._steps, []
        if steps and self._window:
            self._warn(self._early_checks.read_late(trainer))
            mine: Explained | None = None
            for record in steps:
                if self._causes.is_complete:
                    break
                blank = self._blank(trainer, module, record)
                if mine is None:
                    mine = explain(trainer, module, self._window, blank, self._causes.known)
                else:  # of another optimizer, which stepped with the same batches
                    same = {"record": record, "precision": blank.precision, "scale_is": blank.scale_is}
                    mine = mine._replace(report=replace(mine.report, **same))
                self._report(trainer, module, mine)
        num_attempted = self._plugin.records.num_attempted
        if num_attempted != self._num_attempted:  # the next window begins
            self._num_attempted = num_attempted
            self._window.clear()
        if self._causes.is_complete:
            self._stop_looking()

    def _warn(self, texts: list[str]) -> None:
        for text in texts:
            _messages.warn(f"`OverflowLocator`: {text}")

    def _blank(self, trainer: Trainer, module: LightningModule, record: StepRecord) -> OverflowReport:
        """Return what is known of a step before it is run again."""
        assert self._plugin is not None
        first, last = self._window.span
        start = self._largest_weight
        return OverflowReport(
            record=record,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            epoch=trainer.current_epoch,
            batch_idx=last,
            window=(first, last),
            num_replayed=0,
            cause="not reproduced",
            diagnosis=Diagnosis("none"),
            parameters=nonfinite_gradients(_modules.plain_parameters(module)),
            precision=Choice.of(record.precision).canonical,
            largest_weights=None if start is None else (start, _largest_weight(module)),
            scale_is=_scale_is(self._plugin.scaler, record),
        )

    def _report(self, trainer: Trainer, module: LightningModule, mine: Explained) -> None:
        """Report to all ranks. All are here, for the same step: they agree on what is skipped."""
        report = mine.report
        if report.cause == "weights" and not report.note:
            report = replace(report, note=self._early_checks.bad_setting)
        everybodys = gather(trainer, Explained(report, mine.key))
        found = [one for one in everybodys if one.report.cause != "not reproduced" or one.report.note]
        taken = self._causes.add(found or everybodys[:1])
        if trainer.global_rank == 0:
            self._print([report for report in taken if not report.is_repeated])
        if self._files is not None and taken:
            self._files.save(trainer, module, taken, mine.step)

    def _print(self, reports: list[OverflowReport]) -> None:
        with own_lines():
            for report in reports:
                _log.warning(f"OverflowLocator: {report}")
            if reports and self._causes.has_all_causes:
                causes = "1 cause" if self.max_reports == 1 else f"{self.max_reports} different causes"
                _log.warning(f"OverflowLocator: {causes} reported; it looks no more in this run.")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy takes along: the settings and the reports, not the run."""
        nothing: dict[str, Any] = {"_plugin": None, "_counting": None, "_looking": None, "_steps": []}
        return {**vars(self), **nothing, "_window": BatchWindow(), "_early_checks": EarlyChecks()}


def _scale_is(scaler: torch.amp.GradScaler | None, record: StepRecord) -> ScaleIs:
    """Say how the loss scale of a step moves; empty without one."""
    if scaler is None or record.precision != "fp16":
        return ""
    lowest = getattr(scaler, "min_scale", 0.0)
    if scaler.get_backoff_factor() >= 1 or lowest == getattr(scaler, "max_scale", None):
        return "static"
    return "lowest" if record.scale <= lowest else "dynamic"


def _largest_weight(module: LightningModule) -> float:
    """Return the largest magnitude of its parameters. Waits for the device."""
    found = [largest_finite(p.detach()) for p in module.parameters() if p.numel() and p.is_floating_point()]
    return float(stack_scalars(found).max()) if found else 0.0
