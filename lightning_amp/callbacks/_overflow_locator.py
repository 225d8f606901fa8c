"""`OverflowLocator`: which layer, which batch, and what to change."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import is_count, require_count
from lightning_amp._compat import _modules
from lightning_amp._files import write_atomically
from lightning_amp._last_trainer import LastTrainer
from lightning_amp._terminal import own_lines
from lightning_amp._text import counted
from lightning_amp._urls import child, location
from lightning_amp.callbacks._trainers import log_metrics, require_lightning_trainer, why_not_twice
from lightning_amp.casting import Choice
from lightning_amp.numerics import largest_finite, nonfinite_gradients, stack_scalars
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import OverflowReport
from lightning_amp.scaling import Saved, StepRecord, Subscription
from lightning_amp.shadow import BatchWindow, Finding, find, gather, gather_on_zero, packed_step, unpacked_step

OVERFLOWS = "amp/overflows"
_LOOKS = 20
"""How many skips are run again for each report there may be: most show what is known, or a scale that settles."""

_log = logging.getLogger(__name__)


@final
class OverflowLocator(Callback):
    """Finds out why a step was skipped: which module, which parameters, which batch.

    .. code-block:: python

        locator = OverflowLocator(max_reports=3)
        trainer = L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[locator], max_epochs=1)
        trainer.fit(model, data)
        for report in locator.reports:
            print(report.batch_idx, report.cause, report.diagnosis.module)

    ================ =====================================================================
    key              value, at every log point
    ================ =====================================================================
    `amp/overflows`  optimizer steps skipped in this Trainer, those without a report too
    ================ =====================================================================

    After a skipped step it runs the batch again, on a copy of the module: same weights, batch, random numbers and
    scale. It then knows whether the batch, a weight, the forward of a module, the loss, or only the scaled backward was
    not finite, and says so:

    .. code-block:: text

        OverflowLocator: step 7 was skipped: epoch 0, batch 7, loss scale 2**16
          cause: the forward: the output of `net.2` (Linear, ...), float16 [4, 16], is not finite; ...
          non-finite gradients: `net.0.weight`, `net.0.bias`, `net.2.weight` and 1 more
          try: 'bf16', whose range is that of fp32; or ...

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
        max_reports: Stop looking after this many skipped steps, in this Trainer; from then on it only counts. A resumed
            run goes on counting, and has the reports of its checkpoint.
        dirpath: Folder for one JSON file per report, `overflow_step00007_rank0.json`, or its URL (`"s3://bucket/run"`,
            as Lightning's callbacks take it). `None` writes none. If it cannot be written, one warning says so and
            training goes on. A file appears whole or not at all.
        save_bundles: Also saves `overflow_step00007_rank0.pt` there: weights, batch, random state and scale, for
            :func:`lightning_amp.tracing.replay`. As large as the model. Needs `dirpath`.

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
        self._reports: list[OverflowReport] = []
        self._num_located = 0
        self._num_causes = 0
        self._num_overflows = 0
        self._num_calibrating = 0
        self._num_repeated = 0
        self._num_looks = 0
        self._known: set[str] = set()
        self._warned = False

    def _begin_fit(self) -> None:
        self._plugin: AmpPrecision | None = None
        self._counting: Subscription | None = None
        self._looking: Subscription | None = None
        self._window = BatchWindow()
        self._skipped: list[StepRecord] = []  # not looked into yet
        self._num_attempted = 0
        self._steps_seen = 0
        self._largest_weight: float | None = None

    @property
    def reports(self) -> list[OverflowReport]:
        """Return the reports of all fits of one Trainer, on at most `max_reports` skipped steps.

        The same on all ranks: one per step and rank that found a cause; of a step for which none did, that of rank 0.
        """
        return list(self._reports)

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
        if not isinstance(plugin, AmpPrecision):
            _messages.info(
                f"`OverflowLocator` has nothing to look at: the precision plugin {type(plugin).__name__} does not say"
                " which steps it skips. Use `plugins=[AmpPrecision(...)]`."
            )
            return
        self._plugin, self._counting = plugin, plugin.records.subscribe(self._count)
        reason = why_not_twice(trainer, pl_module, "training_step")
        if reason is not None:
            _messages.info(f"`OverflowLocator` counts, but does not look for causes: {reason}.")
        elif not self._is_done:
            self._looking = plugin.records.subscribe(self._receive, at_once=True)
            self._num_attempted = plugin.records.num_attempted
            self._largest_weight = _largest_weight(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
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
            log_metrics(trainer, {OVERFLOWS: float(self._num_overflows)})
        self._steps_seen = steps

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = []
        if self._num_calibrating:
            steps = counted(self._num_calibrating, "step")
            parts.append(f"{steps} skipped while the scale settled, which is how dynamic scaling works")
        if self._num_repeated:
            parts.append(f"{counted(self._num_repeated, 'step')} more skipped for a cause that was reported")
        if parts:
            _messages.info(f"OverflowLocator: {'; '.join(parts)}.")

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
        reports = [report.as_dict() for report in self._reports]
        state: dict[str, Any] = {
            "num_overflows": self._num_overflows, "num_located": self._num_located, "reports": reports,
        }  # fmt: skip
        if self._num_looks:
            state["looks"] = [self._num_looks, self._num_causes, self._num_calibrating, self._num_repeated]
            state["known"] = sorted(self._known)
        return state

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._forget()  # what an earlier fit left; `load_state_dict` follows if the checkpoint knows this callback

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "OverflowLocator")
        num_overflows, num_located = saved.count("num_overflows"), saved.count("num_located")
        looks = saved.entries("looks") if "looks" in state_dict else [num_located, num_located, 0, 0]
        known = saved.entries("known") if "known" in state_dict else []
        if not (len(looks) == 4 and all(is_count(number, 0) for number in looks)):
            raise saved.wrong("looks", "four whole numbers of 0 or more")
        try:
            reports = [OverflowReport.from_dict(values) for values in saved.entries("reports")]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise saved.wrong("reports", "a list of reports, as `OverflowReport.as_dict()` writes them") from error
        self._num_overflows, self._num_located = num_overflows, num_located
        self._num_looks, self._num_causes, self._num_calibrating, self._num_repeated = looks
        self._known = set(map(str, known))
        self._reports = reports

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.close()
            self._looking = None
        self._window.clear()
        self._skipped.clear()

    def _count(self, records: list[StepRecord]) -> None:
        self._num_overflows += sum(record.skipped for record in records)

    def _receive(self, records: list[StepRecord]) -> None:
        self._skipped += [record for record in records if record.skipped]

    def _explain(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._plugin is not None
        self._window.detect_edits()
        skipped, self._skipped = self._skipped, []
        if skipped and self._window:
            finding: Finding | None = None
            for record in skipped:
                if self._is_done:
                    break
                finding = finding or self._find(trainer, module, record)
                self._report(trainer, module, record, finding)
        num_attempted = self._plugin.records.num_attempted
        if num_attempted != self._num_attempted:  # the next window begins
            self._num_attempted = num_attempted
            self._window.clear()
        if self._is_done:
            self._stop_looking()

    @property
    def _is_done(self) -> bool:
        return self._num_causes >= self.max_reports or self._num_looks >= _LOOKS * self.max_reports

    def _find(self, trainer: Trainer, module: LightningModule, record: StepRecord) -> Finding:
        assert self._plugin is not None
        scaler = self._plugin.scaler
        falls = (
            scaler is not None and scaler.get_backoff_factor() < 1 and record.scale > getattr(scaler, "min_scale", 0)
        )
        return find(trainer, module, self._window, record.scale, record.precision, known=self._known, is_dynamic=falls)

    def _report(self, trainer: Trainer, module: LightningModule, record: StepRecord, finding: Finding) -> None:
        """Report to all ranks. All are here, for the same step: they agree on what is skipped."""
        parameters = _modules.plain_parameters(module)
        grown = None if self._largest_weight is None else (self._largest_weight, _largest_weight(module))
        mine = OverflowReport(
            record=record,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            epoch=trainer.current_epoch,
            batch_idx=finding.batch_idx,
            window=self._window.span,
            num_replayed=finding.num_replayed,
            cause="not reproduced" if finding.diagnosis.cause == "none" else finding.diagnosis.cause,
            diagnosis=finding.diagnosis,
            parameters=nonfinite_gradients(parameters) or finding.parameters,
            largest_gradient=finding.largest_gradient,
            note=finding.note,
            precision=Choice.of(record.precision).canonical,
            remedies=finding.remedies,
            largest_weights=grown,
        )
        everybodys = gather(trainer, (mine, finding.key or f"{mine.cause}: {mine.note}"))
        found = [(r, key) for r, key in everybodys if r.cause != "not reproduced" or r.note] or everybodys[:1]
        self._num_looks += 1
        if all(report.is_calibration for report, _ in found):
            self._num_calibrating += 1
            return
        found = [(report, key) for report, key in found if not report.is_calibration]
        reports = [replace(report, is_repeated=key in self._known) for report, key in found]
        is_new = not all(report.is_repeated for report in reports)
        self._known.update(key for _, key in found)
        self._num_repeated += not is_new
        if self._num_located >= self.max_reports:
            if not is_new:
                return
            self._forget_a_repeated_one()
        self._reports += reports
        self._num_located += 1
        self._num_causes += is_new
        if trainer.global_rank == 0:
            self._print([report for report in reports if not report.is_repeated])
        if self.dirpath is not None:
            self._save(trainer, module, reports, finding)

    def _print(self, reports: list[OverflowReport]) -> None:
        with own_lines():
            for report in reports:
                _log.warning(f"OverflowLocator: {report}")
            if reports and self._num_causes == self.max_reports:
                causes = "1 cause" if self.max_reports == 1 else f"{self.max_reports} different causes"
                _log.warning(f"OverflowLocator: {causes} reported; it looks no more in this run.")

    def _forget_a_repeated_one(self) -> None:
        """Make room for a new cause: of those that were reported before, the latest goes."""
        index = next(report.record.index for report in reversed(self._reports) if report.is_repeated)
        self._reports = [r for r in self._reports if r.record.index != index or not r.is_repeated]
        self._num_located -= 1

    def _save(self, trainer: Trainer, module: LightningModule, reports: list[OverflowReport], finding: Finding) -> None:
        """Write on rank 0; what another rank's file needs from there is sent."""
        assert self.dirpath is not None
        bundles: list[bytes | None] = []
        if self.save_bundles:
            mine = next((r for r in reports if r.rank == trainer.global_rank), None)
            bundles = gather_on_zero(trainer, None if mine is None else self._packed(trainer, module, mine, finding))
        if trainer.global_rank != 0:
            return
        try:
            for report in reports:
                stem = child(self.dirpath, f"overflow_step{report.record.index:05d}_rank{report.rank}")
                write_atomically(f"{stem}.json", lambda file, report=report: file.write(report.to_json()))
                packed = bundles[report.rank] if bundles else None
                if packed is not None:
                    bundle = unpacked_step(packed, module)
                    write_atomically(f"{stem}.pt", lambda file, bundle=bundle: torch.save(bundle, file), mode="binary")
        except Exception as error:  # a full disk
            self._warn_of_files(error)

    def _packed(
        self, trainer: Trainer, module: LightningModule, report: OverflowReport, finding: Finding
    ) -> bytes | None:
        if finding.step is None:
            return None
        try:
            return packed_step(trainer, module, finding.step, report.record.scale, report.as_dict())
        except Exception as error:  # a batch that cannot be pickled
            self._warn_of_files(error)
            return None

    def _warn_of_files(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"`OverflowLocator` could not write to `{self.dirpath}`: {error}. Training is not affected."
            _messages.warn_on_this_rank(text)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy takes along: the settings and the reports, not the run."""
        of_the_run = {"_plugin": None, "_counting": None, "_looking": None, "_window": BatchWindow(), "_skipped": []}
        return {**vars(self), **of_the_run}


def _largest_weight(module: LightningModule) -> float:
    """Return the largest magnitude of its parameters. Waits for the device."""
    found = [largest_finite(p.detach()) for p in module.parameters() if p.numel() and p.is_floating_point()]
    return float(stack_scalars(found).max()) if found else 0.0
