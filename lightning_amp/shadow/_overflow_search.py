"""Why a step was skipped: its batches run again, in fp32 too, and with what may help."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import our_name, runnable
from lightning_amp.numerics import fitting_scale, nonfinite_gradients
from lightning_amp.reports import Remedy
from lightning_amp.shadow._batch_window import BatchWindow, KeptBatch
from lightning_amp.shadow._blame import Blame, blame, blame_alone, cause_key, final_key
from lightning_amp.shadow._digits import trials_of_digits, trials_of_logits
from lightning_amp.shadow._failures import Failure
from lightning_amp.shadow._ranks import gather
from lightning_amp.shadow._remedies import (
    Trial,
    Trials,
    calls_like,
    modules_after,
    trials_in_any_precision,
    trials_in_half,
    trials_of_scale,
)
from lightning_amp.shadow._step_runs import BOUNDARY, StepInFp32, run_in_fp32, run_trial
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Diagnosis, GradientPlace, OperationWatch, Trace, diagnose


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
        return not self._any(failed)

    def _any(self, flag: bool) -> bool:
        return any(gather(self._trainer, flag))

    def _begin(self) -> None:
        self._replay = TrainingPass(self._trainer, self._module, precision=self._precision)

    # -- the step as it was --------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        assert self._replay is not None
        self._is_new, replay, step = False, self._replay, self._step
        with Trace(replay.module) as trace, OperationWatch(replay.module, BOUNDARY) as watch:
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
        assert self._watch is not None
        failure: Failure | None = None
        exact: StepInFp32 | None = None
        try:
            exact = run_in_fp32(self._trainer, self._module, self._replay, self._step, self._watch, self._half_places)
        except Exception as error:
            failure = Failure.of(error, "the training step", "the replay in fp32")
        if not self._is_new or self.finding is None:
            return
        finding = self.finding
        if exact is None:
            assert failure is not None
            note = f"it could not be run in fp32 ({failure.reason})"
            if "modified by an inplace operation" not in failure.reason:
                finding = replace(finding, note="; ".join(filter(None, (finding.note, note))))
            blamed = blame_alone(self._replay.module, finding.diagnosis, self._watch)
        else:
            module = self._replay.module
            blamed = blame(module, finding.diagnosis, self._watch, exact.found, exact.watch, self._step.batch)
            if finding.diagnosis.cause == "backward":
                finding = replace(finding, largest_gradient=exact.largest)
        key = final_key(blamed.diagnosis, finding.key)
        self.finding = replace(finding, diagnosis=blamed.diagnosis, key=key)
        self._hidden_in = exact.watch if exact is not None and blamed.is_swallowed else None
        if failure is None or not failure.out_of_memory:
            self._trials = self._plan(blamed, None if exact is None else exact.largest)
            self._trial = next(self._trials, None)

    # -- what helps ----------------------------------------------------------------------------------------------------

    def _plan(self, blamed: Blame, largest: float | None) -> Trials:
        found, call = blamed.diagnosis, blamed.call
        bad = [] if self._watch is None else self._watch.bad
        alike = [] if call is None else calls_like(call, bad)
        if found.in_fp32 != "finite":
            if found.cause not in ("batch", "weights"):
                yield from trials_of_logits(call, alike)
                yield from trials_in_any_precision(found.operation, call, alike)
            if found.in_fp32 == "not finite" or self._worked:
                return
        precision = self._precision or our_name(str(self._trainer.precision_plugin.precision))
        if found.cause == "backward" and precision == "fp16":
            fitting = self._loss_scale if largest is None else fitting_scale(largest, spare_bits=0, lowest=-126)
            yield from trials_of_scale(self._loss_scale, fitting)
            if self._worked:
                return
        takers = [] if call is None else modules_after(call, bad, self._module)
        yield from trials_of_digits(found.operation, call, alike)
        lost_by = [remedy.values[2] for remedy in self._worked if remedy.kind == "source in fp32"]
        if lost_by:
            yield from trials_of_logits(call, alike)
        choices = runnable(self._root_device)
        # an epsilon that was added in vain, and so rounded away, may only have been too small
        yield from trials_in_half(precision, choices, found.operation, call, takers, epsilons=lost_by in ([], ["add"]))

    @property
    def _worked(self) -> list[Remedy]:
        return [] if self.finding is None else [remedy for remedy in self.finding.remedies if remedy.worked]

    def _try(self) -> None:
        """Run the step as the trial says; a rank without one runs it as it was."""
        assert self._replay is not None
        trial = self._trial or Trial(Remedy(""))
        scale = trial.scale if trial.scale is not None else 1.0 if self._is_dynamic else self._loss_scale
        worked = run_trial(self._trainer, self._replay, self._step, trial, scale, self._hidden_in)
        if self._trial is None or self._trials is None or self.finding is None:
            return
        remedy = trial.remedy._replace(worked=worked)
        key = remedy.kind if worked and remedy.kind in ("scale", "divisor") else self.finding.key
        self.finding = replace(self.finding, remedies=(*self.finding.remedies, remedy), key=key)
        try:
            self._trial = self._trials.send(worked)
        except StopIteration:
            self._trial = None


def _edited(step: KeptBatch) -> str:
    if not step.edited:
        return ""
    return (
        "the step edited its batch in place, so that the replay saw an edited one; from the next batch on it is copied"
    )
