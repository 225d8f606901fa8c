"""`OverflowLocator`: find the layer and the batch that made a step overflow, and a remedy."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._arguments import is_number, require_count
from lightning_amp._compat import _lightning, _modules
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp._files import location, write_atomically
from lightning_amp._terminal import own_lines
from lightning_amp._text import counted, named
from lightning_amp.callbacks._observer import Observer, is_log_point, log_metrics, no_mixed_precision, why_not_twice
from lightning_amp.causes import explain, origins, weight_growth, weight_sizes
from lightning_amp.findings import StepRecord
from lightning_amp.numerics import dense, names_of_nonfinite
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import Overflow, describe_growth
from lightning_amp.scaling import Saved, Subscription
from lightning_amp.shadow import BatchWindow, gather, in_one_line

OVERFLOWS = "amp/overflows"
_STATISTICS = ("running_mean", "running_var")

_log = logging.getLogger(__name__)


@final
class OverflowLocator(Observer):
    """Finds out why a step was skipped: which module, which parameters, which batch.

    .. code-block:: python

        locator = OverflowLocator(max_reports=3)
        trainer = L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[locator], max_epochs=1)
        trainer.fit(model, data)
        for report in locator.reports:
            print(report.batch_idx, report.cause, report.module, report.line)

    ================ =====================================================================
    key              value, at every log point
    ================ =====================================================================
    `amp/overflows`  optimizer steps skipped in this Trainer, those without a report too
    ================ =====================================================================

    After a skipped step it runs the batch again on a copy of the module, with the same weights, random numbers and loss
    scale. It then runs the batch in fp32, and with remedies. The report states whether the batch, a weight, the forward
    of a module, the loss, or only the backward was not finite. It names the operation and the line, and a remedy that
    works:

    .. code-block:: text

        Step 7 skipped (batch 7): fp16 overflow in the forward
          head: exp gave 5.76e+10, fp16 ends at 65,504      losses.py:75  return torch.log(torch.exp(sim).sum(-1))
          fix: AmpPrecision("bf16") (tried: works), or subtract the maximum before it (`torch.logsumexp`) (not tried)

    "(tried: works)" says that the step ran again with this remedy. Loss and gradients were finite then, the loss
    equalled the loss in fp32, up to rounding, and the error of the gradient was smaller than the gradient. Each cause
    is printed once. Later steps that look alike are counted. Steps that were skipped while a dynamic scale settled are
    counted too, which is no fault. One line at the end of fit has both counts.

    If the loss is not finite although its gradients are, the step is taken. The locator reports this once, in the same
    way.

    At the start of the fit a warning names parameters and buffers that are not finite. If a weight is not finite since
    a step with a learning rate of NaN or infinity, the report names that step. (A learning rate in a tensor on an
    accelerator is not read.) The error that ends a stuck run repeats the cause that was found.

    :attr:`reports` has the reports as data. The locator never changes results: weights are bit-identical with and
    without it. The copy has its own parameters, buffers, metrics, lists, logger and random generators, and is dropped
    after the replay. User code outside of the module (prints, files, global variables) runs twice for a skipped batch.

    With accumulation all batches since the last step are run again until one is not finite, as many of them as fit into
    256 MiB. With several processes each rank runs its own batches again. Every rank that finds a cause is reported,
    with its number. In tensor parallelism only the rank where the fault began is reported, with its shard;
    rank 0 logs and writes the files for all.

    A replay may differ from the real step. It has the weights after a step that was taken. The step may have changed
    attributes of the module (a counter, a schedule of its own). Another optimizer may have changed weights in the same
    manual step. A batch may have been edited in place; after the first such batch, each one is copied before its step.
    Callbacks that draw random numbers or edit the batch in `on_train_batch_start` should stand before this one in the
    list. Modules compiled by `torch.compile` run eagerly in the replay. The replay cannot see inside modules compiled
    by TorchScript. The locator sees only skips of :class:`~lightning_amp.AmpPrecision`; with another plugin it logs a
    line and does nothing.

    Args:
        max_reports: Stop searching after this many different causes in this Trainer; from then on it only counts. A
            resumed run continues to count, and has the reports of its
            checkpoint.
        dirpath: Folder for one JSON file per report, `overflow_step00007_rank0.json`, or its URL (`"s3://bucket/run"`,
            as Lightning's callbacks take it). `None` writes none. If it cannot be written, the locator warns once and
            training goes on. A file appears whole or not at all.

    Attributes:
        reports: The reports of all fits of one Trainer, on at most `max_reports` skipped steps. Each cause has one. If
            there is room, each further step that was skipped for a known cause has one. All ranks have the same
            reports: one for each step and rank that found a cause. If no rank found the cause of a step, it has the
            report of rank 0.

    Raises:
        ValueError: If an argument is out of its range, or fsspec does not support the protocol of `dirpath`.
        ImportError: If the driver for `dirpath` is not installed.

    Cost: the locator reads the skip flag of each step at once, because the replay needs the batch. So the host waits
    once per batch; after the last report, it waits once per log point. Keeping random states and a reference to the
    batch takes 0.1 to 0.2 ms of host time. A report costs one or more steps and, during these, the memory of one more
    set of parameters, gradients and activations. If there is not enough memory, the report mentions it and training
    continues. Leave it out of a run that must not wait, once the model trains without skips.
    """

    def __init__(self, *, max_reports: int = 10, dirpath: str | os.PathLike[str] | None = None) -> None:
        require_count("max_reports", max_reports, least=0)
        self.max_reports = max_reports
        self.dirpath = None if dirpath is None else location(dirpath, "dirpath")
        super().__init__()
        self._begin_fit()

    @override
    def _forget(self) -> None:
        super()._forget()
        self.reports: list[Overflow] = []
        self._num_overflows = self._num_harmless = self._num_repeated = 0
        self._latest: tuple[int, str] | None = None  # the last skip, and the key of its cause
        self._weights: tuple[float, float] | None = None  # their sizes at the first start

    def _begin_fit(self) -> None:
        self._plugin: AmpPrecision | None = None
        self._counting: Subscription | None = None
        self._looking: Subscription | None = None
        self._window = BatchWindow()
        self._failure = ""
        # steps that were skipped, or had a loss that is not finite, and were not run again yet
        self._steps: list[StepRecord] = []
        self._num_attempted = self._steps_seen = 0
        self._bad_rate: tuple[int, float] | None = None

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = trainer.strategy.precision_plugin
        self._begin_fit()
        self._steps_seen = trainer.global_step
        if not isinstance(plugin, AmpPrecision):
            unknown = f"{type(plugin).__name__} does not say which steps it skips. Use `plugins=[AmpPrecision(...)]`"
            self._stand_aside(no_mixed_precision(trainer) or unknown)
            return
        _warn_of_bad_values(pl_module)
        self._plugin = plugin
        self._counting = plugin.records.subscribe(self._count, before_update=self._note_rate, cause=self._since)
        reason = why_not_twice(trainer, pl_module, "training_step")
        if reason is not None:
            _messages.info(f"`OverflowLocator` counts, but does not look for causes: {reason}.")
        elif not self._is_complete:
            self._looking = plugin.records.subscribe(self._receive, at_once=True, on_bad_loss=self._on_bad_loss)
            self._num_attempted = plugin.records.num_attempted
            if self._weights is None:
                self._weights = weight_sizes(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._looking is not None:
            try:
                self._window.add(batch, batch_idx, trainer.strategy.root_device.type)
            except Exception as error:  # such as a batch that cannot be copied
                self._failure = self._failure or in_one_line(error)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._plugin is None:
            return
        if self._looking is not None:
            self._look(trainer, pl_module)
        before, self._steps_seen = self._steps_seen, trainer.global_step
        if is_log_point(trainer, before):
            self._plugin.records.flush()
            log_metrics(trainer, {OVERFLOWS: float(self._num_overflows)})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fell = "skipped while the scale settled, which is how dynamic scaling works"
        if self._plugin is not None and 2 * self._num_harmless > self._plugin.num_steps + self._plugin.num_skipped > 8:
            fell = "skipped while the scale fell, most of the fit. If a longer fit goes on so, the loss is too large"
        counts = {fell: self._num_harmless, "more skipped like a reported one, and not looked into": self._num_repeated}
        if parts := [f"{counted(number, 'step')} {why}" for why, number in counts.items() if number]:
            _messages.info(f"OverflowLocator: {'; '.join(parts)}.")
        growth = weight_growth(trainer, pl_module, self._weights)
        if growth is not None and growth[0] == "typical" and all(report.growth is None for report in self.reports):
            _messages.info(
                f"OverflowLocator: weights have grown by orders of magnitude.\n  fix: {describe_growth(*growth)}"
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._plugin is not None:
            if not isinstance(exception, FloatingPointError):  # this exception came from reading the records
                with contextlib.suppress(Exception):
                    self._plugin.records.flush()
            elif self._looking is not None:  # the plugin raised after the last skip, before the end of the batch
                self._look(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)

    @override
    def _close(self) -> None:
        if self._counting is not None:
            self._counting.close()
        self._stop_looking()
        self._plugin = self._counting = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._plugin is not None:
            self._plugin.flush()  # hooks may have stepped since the last batch
        return {
            "num_overflows": self._num_overflows,
            "num_harmless": self._num_harmless,
            "num_repeated": self._num_repeated,
            "weights": self._weights and [*self._weights],
            "reports": [report.as_dict() for report in self.reports],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Saved(state_dict, "OverflowLocator")
        try:
            reports = [Overflow.from_dict(values) for values in saved.entries("reports")]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise saved.wrong("reports", "a list of reports, as `Overflow.as_dict()` writes them") from error
        weights = saved.take("weights", "two numbers, or none", lambda one: one is None or _are_two_numbers(one))
        counts = map(saved.count, ("num_overflows", "num_harmless", "num_repeated"))
        self._num_overflows, self._num_harmless, self._num_repeated = counts
        self._weights, self.reports = weights and tuple(weights), reports

    # -- work ----------------------------------------------------------------------------------------------------------

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.close()
            self._looking = None
        self._window.clear()
        self._steps.clear()

    def _count(self, records: list[StepRecord]) -> None:
        self._num_overflows += sum(record.skipped for record in records)
        if self._bad_rate is not None and any(r.skipped and r.index == self._bad_rate[0] for r in records):
            self._bad_rate = None  # the step did not use it

    def _receive(self, records: list[StepRecord]) -> None:
        self._steps += [record for record in records if record.skipped]

    def _on_bad_loss(self, record: StepRecord) -> None:
        self._steps.append(record)
        if self._looking is not None:
            self._looking.on_bad_loss = None  # one report of a bad loss is enough

    def _note_rate(self, step: int, optimizer: Optimizer) -> None:
        """Note the first step whose learning rate is not finite. A tensor on an accelerator is not waited for."""
        rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
        on_host = [float(rate) for rate in rates if not (isinstance(rate, Tensor) and rate.device.type != "cpu")]
        bad = [rate for rate in on_host if not math.isfinite(rate)]
        if bad and self._bad_rate is None:
            self._bad_rate = step, bad[0]

    @property
    def _is_complete(self) -> bool:
        return len({report.key for report in self.reports}) >= self.max_reports

    def _since(self, step: int) -> str:
        """Write the cause of the last skip, and the advice; return an empty text if the skip was before this step."""
        if self._latest is None or self._latest[0] < step:
            return ""
        text = next((report.in_one_line for report in self.reports if report.key == self._latest[1]), "")
        return text and f"The cause, as `OverflowLocator` found it: {text}."

    def _look(self, trainer: Trainer, module: LightningModule) -> None:
        """Find out why steps were skipped. A failure in here ends the search, and never the fit."""
        assert self._plugin is not None
        steps, self._steps, failure = self._steps, [], ""
        try:
            if steps and (self._window or self._failure):
                failure = next(filter(None, gather(trainer, self._failure)), "")
                self._explain(trainer, module, [] if failure else steps)
        except Exception as error:
            self._failure = in_one_line(error)  # several ranks stop together, at the next skip
            failure = self._failure if trainer.world_size == 1 else ""
        if failure:
            _messages.warn(f"`OverflowLocator` looks no more: {failure}. Training goes on; skipped steps are counted.")
        num_attempted = self._plugin.records.num_attempted
        if num_attempted != self._num_attempted:  # the next window begins
            self._num_attempted = num_attempted
            self._window.clear()
        if failure or self._is_complete:
            self._stop_looking()

    def _explain(self, trainer: Trainer, module: LightningModule, steps: list[StepRecord]) -> None:
        """Report steps to all ranks. All ranks have the same steps, because they agree on skips."""
        mine: Overflow | None = None
        for record in steps:
            if self._is_complete:
                return
            if mine is None:
                known = {report.key for report in self.reports}
                mine = explain(trainer, module, self._window, record, self._weights, known)
            mine = replace(mine, record=record)  # the step of another optimizer has the same batches
            if mine.cause == "weights" and self._bad_rate is not None:
                mine = replace(mine, cause="learning rate", bad_rate=self._bad_rate)
            everybodys = gather(trainer, mine)
            found = [one for one in everybodys if one.cause != "not reproduced" or one.note]
            self._report(record, [one for one in origins(trainer, found) or everybodys[:1] if not one.is_harmless])

    def _report(self, record: StepRecord, faults: list[Overflow]) -> None:
        """Keep the reports of a step; print and write those of a new cause. Without reports the skip was harmless."""
        known = {report.key for report in self.reports}
        new = [one for one in faults if one.key not in known]
        if record.skipped:
            self._latest = (record.index, faults[0].key) if faults else None
            self._num_harmless += not faults
            self._num_repeated += bool(faults) and not new
        has_room = len({report.record.index for report in self.reports}) < self.max_reports
        taken = new or (faults if record.skipped and has_room else [])
        if new and not has_room:  # a new cause takes the place of the latest skip for a known one
            first = {report.key: report.record.index for report in reversed(self.reports)}
            repeated = [r.record.index for r in self.reports if r.record.index not in first.values()]
            self.reports = [r for r in self.reports if r.record.index not in repeated[-1:]]
        self.reports += taken
        if not _lightning.is_rank_zero():
            return
        with own_lines():
            for report in new:
                _log.warning(str(report))
            if new and self._is_complete:
                causes = "1 cause" if self.max_reports == 1 else f"{self.max_reports} different causes"
                _log.warning(f"OverflowLocator: {causes} reported; it looks no more in this run.")
        for report in taken:
            name = f"overflow_step{report.record.index:05d}_rank{report.rank}.json"
            self._write(name, lambda path, report=report: write_atomically(path, lambda f: f.write(report.to_json())))


def _warn_of_bad_values(module: nn.Module) -> None:
    """Name parameters and buffers with NaN or infinity. This waits for the device once."""
    tensors = {_modules.plain_name(n): t for n, t in [*module.named_parameters(), *module.named_buffers()]}
    strict = {name for name, t in tensors.items() if t.requires_grad or name.endswith(_STATISTICS)}
    bad = [name for name in names_of_nonfinite(tensors.items()) if name in strict or not _is_marker(tensors[name])]
    if bad:
        _messages.warn(
            f"`OverflowLocator`: Before the first step, parameters or buffers have NaN or infinity: {named(bad)}. No"
            " step can mend that, in any precision: load or compute the values anew."
        )


def _is_marker(tensor: Tensor) -> bool:
    """Return whether values may be bad on purpose: infinities of masks and distances, observers that are all NaN."""
    nan = torch.isnan(dense(tensor.detach()))
    return bool(nan.all() or not nan.any())


def _are_two_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(one, finite=False) for one in value)
