"""Why a step was skipped: its batches run again, in fp32 too, and with what may help."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import Fp32Modules, our_name, runnable
from lightning_amp.numerics import HALF_DTYPES, all_finite, fitting_scale, nonfinite_gradients
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import Remedy
from lightning_amp.shadow import _training_pass
from lightning_amp.shadow._batch_window import BatchWindow, KeptBatch
from lightning_amp.shadow._blame import Blame, blame, cause_key, final_key
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.shadow._ranks import gather
from lightning_amp.shadow._remedies import (
    Trial,
    Trials,
    modules_after,
    trials_in_any_precision,
    trials_in_half,
    trials_of_scale,
)
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Diagnosis, GradientPlace, OperationWatch, Trace, diagnose, full_precision

_BOUNDARY = _training_pass.__file__


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What the replay of a window showed.

    Attributes:
        diagnosis: Where the first non-finite value arose.
        batch_idx: Of the batch that failed, or the last one.
        num_replayed: How many batches ran again.
        parameters: Those with non-finite gradients.
        note: Why it may not be exact.
        step: The batch.
        largest_gradient: The largest true gradient of a finite step, as far as half precision would have to hold it.
        remedies: What was tried.
        key: The same for the same cause.
        is_known: Whether the caller knew that cause, so that nothing else was looked at.

    """

    diagnosis: Diagnosis
    batch_idx: int
    num_replayed: int
    parameters: tuple[str, ...] = ()
    note: str = ""
    step: KeptBatch | None = None
    largest_gradient: float | None = None
    remedies: tuple[Remedy, ...] = ()
    key: str = ""
    is_known: bool = False


def find(
    trainer: Trainer,
    module: LightningModule,
    window: BatchWindow,
    scale: float,
    precision: str = "",
    *,
    known: Collection[str] = (),
    is_dynamic: bool = True,
) -> Finding:
    """Run the batches of the window again until one is not finite. Never raises, changes nothing.

    All ranks must call. They run as many passes, whatever each of them finds: a step may talk to the other ranks
    (`self.all_gather`, SyncBatchNorm).

    Args:
        trainer: The trainer.
        module: What it trains.
        window: The batches.
        scale: That the step was taken at.
        precision: That it was taken in, by our name; the plugin may have gone on in another. Empty: as of now.
        known: Keys of causes that need no second look.
        is_dynamic: Whether the scale falls by itself.

    """
    steps = list(window.kept)
    steps = steps[-min(gather(trainer, len(steps))) :]
    search = _Search(trainer, module, scale, precision, steps[-1], known, is_dynamic)
    search.run(steps)
    note = "; ".join(filter(None, (_edited(steps[-1]), search.unseen)))
    return search.finding or Finding(Diagnosis("none"), steps[-1].batch_idx, len(steps), note=note, step=steps[-1])


@final
class _Search:
    """One replay of a window, on all ranks in step."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        scale: float,
        precision: str,
        last: KeptBatch,
        known: Collection[str],
        is_dynamic: bool,
    ) -> None:
        self.finding: Finding | None = None
        self._trainer, self._module, self._loss_scale = trainer, module, scale
        self._precision, self._known, self._is_dynamic = precision, known, is_dynamic
        self._root_device = trainer.strategy.root_device
        self._step, self._number = last, 0
        self._replay: TrainingPass | None = None
        self._watch: OperationWatch | None = None
        self._is_new = False
        self._unseen: list[str] = []
        self._half_places: set[GradientPlace] = set()
        self._trials: Trials | None = None
        self._trial: Trial | None = None
        self._phase = "the replay"
        self._hidden_in: OperationWatch | None = None  # in fp32, of a value that the loss does not show

    @property
    def unseen(self) -> str:
        """Say what cannot be looked into."""
        names = ", ".join(f"`{name}`" for name in self._unseen[:3]) + (", ..." if len(self._unseen) > 3 else "")
        return names and f"{names} is compiled by TorchScript, which cannot be looked into"

    def run(self, steps: list[KeptBatch]) -> None:
        """Run the steps until all ranks have found something, or one cannot go on."""
        try:
            if not self._all(self._begin):
                return
            for self._number, self._step in enumerate(steps, start=1):
                if not self._all(self._run_step):
                    return
                if self._any(self._is_new) and self._all(self._compare):
                    self._phase = "trials"
                    while self._any(self._trial is not None) and self._all(self._try):
                        pass
                if not self._any(self.finding is None):
                    return
        finally:
            if self._replay is not None:
                self._replay.close()

    def _all(self, work: Callable[[], None]) -> bool:
        """Return whether `work` worked on all ranks."""
        failed = False
        try:
            work()
        except Exception as error:
            failed, failure = True, Failure.of(error, "the training step", "the replay")
            if self.finding is None:
                done = max(self._number - 1, 0)
                note = failure.text
                if failure.out_of_memory:
                    note += ": there is no cause to report. A smaller batch needs less"
                self.finding = Finding(Diagnosis("none"), self._step.batch_idx, done, note=note, step=self._step)
            elif self._is_new and self._phase != "trials" and self.finding.diagnosis.cause == "backward":
                # the cause is known, only how it is in fp32 is not
                missing = f"the true gradients could not be measured in fp32 ({failure.reason})"
                note = "; ".join(filter(None, (self.finding.note, missing)))
                self.finding = replace(self.finding, note=note)
        return not self._any(failed)

    def _any(self, flag: bool) -> bool:
        return any(gather(self._trainer, flag))

    def _begin(self) -> None:
        self._replay = TrainingPass(self._trainer, self._module, precision=self._precision)

    # -- the step as it was --------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        assert self._replay is not None
        self._is_new, replay, step = False, self._replay, self._step
        with Trace(replay.module) as trace, OperationWatch(replay.module, _BOUNDARY) as watch:
            loss = replay.run(
                step.batch,
                step.batch_idx,
                context=replay.forward_context(),
                random_state=step.random_state,
                scale=self._loss_scale,
                trace=trace,
                watch=watch,
            )
        found = diagnose(trace, loss, step.batch)
        parameters: tuple[str, ...] = ()
        if found.cause != "none":
            parameters = nonfinite_gradients(_modules.plain_parameters(replay.module))
        replay.forget_gradients()
        self._unseen, self._half_places, self._watch = trace.unseen, trace.half_places, watch
        if found.cause == "none" or self.finding is not None:
            return
        note = "; ".join(filter(None, (_edited(step), self.unseen)))
        key = cause_key(found, watch)
        self._is_new = key not in self._known
        self.finding = Finding(
            found, step.batch_idx, self._number, parameters, note, step, key=key, is_known=not self._is_new
        )

    # -- in fp32 -------------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Run it in fp32: is it finite there, how large is what was not, and which operation made the difference."""
        assert self._replay is not None
        exact = self._replay
        if any(parameter.dtype in HALF_DTYPES for parameter in self._module.parameters()):
            exact = TrainingPass(self._trainer, self._module, upcast=True)
        wanted = [] if self._watch is None else [call.key for call in self._watch.bad]
        if self._watch is not None and self._watch.first_backward is not None:
            wanted.append(self._watch.first_backward.call.key)
        try:
            watch = OperationWatch(exact.module, _BOUNDARY, wanted, undo_casts=True)
            with Trace(exact.module) as trace, watch:
                loss = exact.run(
                    copy_batch(self._step.batch, upcast=True),
                    self._step.batch_idx,
                    context=full_precision(self._root_device.type),
                    random_state=self._step.random_state,
                    trace=trace,
                    watch=watch,
                )
            found = diagnose(trace, loss, self._step.batch)
            parameters = nonfinite_gradients(_modules.plain_parameters(exact.module))
            arrivals = trace.gradients_in_half(self._half_places)
            largest = float(torch.stack([a.largest for a in arrivals]).max()) if arrivals else None
        finally:
            exact.forget_gradients()
            if exact is not self._replay:
                exact.close()
        if not self._is_new or self.finding is None or self._watch is None:
            return
        found = found if found.cause != "none" or not parameters else Diagnosis("backward", where="parameter")
        blamed = blame(exact.module, self.finding.diagnosis, self._watch, found, watch, self._step.batch)
        if self.finding.diagnosis.cause == "backward":
            self.finding = replace(self.finding, largest_gradient=largest)
        key = final_key(blamed.diagnosis, self.finding.key)
        self.finding = replace(self.finding, diagnosis=blamed.diagnosis, key=key)
        self._hidden_in = watch if blamed.is_swallowed else None
        self._trials = self._plan(blamed, largest)
        self._trial = next(self._trials, None)

    # -- what helps ----------------------------------------------------------------------------------------------------

    def _plan(self, blamed: Blame, largest: float | None) -> Trials:
        found, call = blamed.diagnosis, blamed.call
        if found.in_fp32 == "not finite":
            if found.cause not in ("batch", "weights"):
                yield from trials_in_any_precision(found.operation, call)
            return
        precision = self._precision or our_name(str(self._trainer.precision_plugin.precision))
        if found.cause == "backward" and precision == "fp16":
            fitting = fitting_scale(largest or 0.0, spare_bits=0, lowest=-126)
            yield from trials_of_scale(self._loss_scale, fitting)
            if self.finding is not None and any(remedy.worked for remedy in self.finding.remedies):
                return
        bad = [] if self._watch is None else self._watch.bad
        takers = [] if call is None else modules_after(call, bad, self._module)
        yield from trials_in_half(precision, runnable(self._root_device), found.operation, call, takers)

    def _try(self) -> None:
        """Run the step as the trial says; a rank without one runs it as it was."""
        trial = self._trial or Trial(Remedy(""))
        worked = self._works(trial)
        if self._trial is None or self._trials is None or self.finding is None:
            return
        remedy = trial.remedy._replace(worked=worked)
        key = remedy.kind if worked and remedy.kind in ("scale", "divisor") else self.finding.key
        self.finding = replace(self.finding, remedies=(*self.finding.remedies, remedy), key=key)
        try:
            self._trial = self._trials.send(worked)
        except StopIteration:
            self._trial = None

    def _works(self, trial: Trial) -> bool:
        replay = self._replay
        assert replay is not None
        scale = trial.scale if trial.scale is not None else 1.0 if self._is_dynamic else self._loss_scale
        rules: Fp32Modules | None = None
        plugin = self._trainer.precision_plugin
        context = replay.forward_context()
        if trial.precision and isinstance(plugin, AmpPrecision):
            context = plugin.forward_context_of(trial.precision)
        try:
            if trial.rules:
                rules = Fp32Modules(replay.module, trial.rules, self._root_device.type, active=True)
            looks = trial.edits or self._hidden_in is not None
            watch = OperationWatch(replay.module, _BOUNDARY, edits=trial.edits) if looks else None
            with watch or nullcontext():
                loss = replay.run(
                    self._step.batch,
                    self._step.batch_idx,
                    context=context,
                    random_state=self._step.random_state,
                    scale=scale,
                )
            if watch is not None and self._hidden_in is not None:
                there = {call.key for call in self._hidden_in.bad}
                if any(call.makes_nan and call.key not in there for call in watch.bad):
                    return False
            return _is_finite(loss) and not nonfinite_gradients(_modules.plain_parameters(replay.module))
        finally:
            replay.forget_gradients()
            if rules is not None:
                rules.remove()


def _is_finite(loss: Tensor | None) -> bool:
    return loss is None or bool(all_finite([loss]))


def _edited(step: KeptBatch) -> str:
    if not step.edited:
        return ""
    return (
        "the step edited its batch in place, so that the replay saw an edited one; from the next batch on it is copied"
    )
