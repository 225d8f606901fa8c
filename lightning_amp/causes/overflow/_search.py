"""Why a step was skipped: its batches run again, in fp32 too, and with what may help."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp.casting import our_name, runnable
from lightning_amp.causes.overflow._blame import Blame, blame, blame_alone, key_as_it_was, key_beside_fp32
from lightning_amp.causes.overflow._remedies import Case, calls_like, modules_after, try_remedies
from lightning_amp.causes.overflow._runs import Rerun, StepAsItWas, StepInFp32, run_as_it_was, run_in_fp32
from lightning_amp.findings import Remedy, StepRecord
from lightning_amp.numerics import fitting_scale
from lightning_amp.reports import OverflowReport, cause_of
from lightning_amp.shadow import BatchWindow, Failure, KeptBatch, Lockstep, OtherRankFailedError, TrainingPass, gather


@final
class Explained(NamedTuple):
    """What one rank found out about a skipped step.

    Attributes:
        report: For people and programs.
        key: The same for the same cause, whichever batch shows it.
        step: The batch that it is about.

    """

    report: OverflowReport
    key: str
    step: KeptBatch | None = None


def explain(
    trainer: Trainer,
    module: LightningModule,
    window: BatchWindow,
    report: OverflowReport,
    known: Collection[str] = (),
) -> Explained:
    """Run the batches of a window again until one is not finite, and complete a report. Never raises, changes nothing.

    All ranks must call. They run as many passes, whatever each of them finds.

    Args:
        trainer: The trainer.
        module: What it trains.
        window: The batches.
        report: Has what is known without a replay.
        known: Keys of causes that need neither a run in fp32 nor remedies.

    """
    ranks, record, device = Lockstep(trainer), report.record, trainer.strategy.root_device
    steps = list(window.kept)
    steps = steps[-min(gather(trainer, len(steps))) :]
    found: Explained | None = None
    number, step, note = 0, steps[-1], _edited(steps[-1])
    with ExitStack() as stack:

        def start() -> TrainingPass:
            return stack.enter_context(closing(TrainingPass(trainer, module, precision=record.precision)))

        try:
            replay = ranks.run(start)
            for number, step in enumerate(steps, start=1):
                run = ranks.run(partial(run_as_it_was, replay, step, record.scale))
                note, is_new = "; ".join(filter(None, (_edited(step), _unseen(run.unseen)))), False
                if found is None and run.found.cause != "none":
                    found = _as_it_was(report, run, step, number, note)
                    is_new = found.key not in known
                if ranks.any(is_new):
                    in_fp32 = ranks.run(partial(run_in_fp32, trainer, module, replay, step, run))
                    scale = 1.0 if report.scale_is == "dynamic" else record.scale
                    rerun = Rerun(trainer.precision_plugin, device.type, replay, step, scale)
                    with ranks.until_all_are_done(rerun.is_finite):
                        if is_new and found is not None:
                            found, blamed = _beside_fp32(found, replay.module, run, in_fp32, step)
                            if not (isinstance(in_fp32, Failure) and in_fp32.out_of_memory):
                                case = _case(trainer, module, record, blamed, run, in_fp32, rerun)
                                found = _with_remedies(found, try_remedies(ranks, case))
                if ranks.all(found is not None):
                    break
        except OtherRankFailedError:
            pass
        except Exception as error:
            failure = Failure.of(error, "the training step", "the replay")
            if found is None:
                too_large = ": there is no cause to report. A smaller batch needs less" * failure.out_of_memory
                return _not_found(report, step, max(number - 1, 0), failure.text + too_large)
    return found or _not_found(report, steps[-1], len(steps), note)


def _not_found(report: OverflowReport, step: KeptBatch, number: int, note: str) -> Explained:
    report = replace(report, batch_idx=step.batch_idx, num_replayed=number, note=note)
    return Explained(report, f"{report.cause}: {note}", step)


def _as_it_was(report: OverflowReport, run: StepAsItWas, step: KeptBatch, number: int, note: str) -> Explained:
    report = replace(
        report,
        cause=cause_of(run.found),
        diagnosis=run.found,
        batch_idx=step.batch_idx,
        num_replayed=number,
        parameters=report.parameters or run.parameters,
        note=note,
    )
    return Explained(report, key_as_it_was(run.found, run.watch), step)


def _beside_fp32(
    found: Explained, module: LightningModule, run: StepAsItWas, in_fp32: StepInFp32 | Failure, step: KeptBatch
) -> tuple[Explained, Blame]:
    """Say what fp32 makes of it, and which operation made the difference."""
    report = found.report
    if isinstance(in_fp32, Failure):
        blamed = blame_alone(module, run.found, run.watch)
        if "modified by an inplace operation" not in in_fp32.reason:
            note = f"it could not be run in fp32 ({in_fp32.reason})"
            report = replace(report, note="; ".join(filter(None, (report.note, note))))
    else:
        blamed = blame(module, run.found, run.watch, in_fp32.found, in_fp32.watch, step.batch)
        if report.cause == "backward":
            report = replace(report, largest_gradient=in_fp32.largest)
    report = replace(report, diagnosis=blamed.diagnosis, cause=cause_of(blamed.diagnosis))
    return found._replace(report=report, key=key_beside_fp32(blamed.diagnosis, found.key)), blamed


def _case(
    trainer: Trainer,
    module: LightningModule,
    record: StepRecord,
    blamed: Blame,
    run: StepAsItWas,
    in_fp32: StepInFp32 | Failure,
    rerun: Rerun,
) -> Case:
    call, largest = blamed.call, None if isinstance(in_fp32, Failure) else in_fp32.largest
    if blamed.is_swallowed and isinstance(in_fp32, StepInFp32):
        rerun = replace(rerun, hidden_in=in_fp32.watch)
    return Case(
        blamed.diagnosis,
        call,
        alike=() if call is None else calls_like(call, run.watch.bad),
        takers=() if call is None else modules_after(call, run.watch.bad, module),
        precision=record.precision or our_name(str(trainer.precision_plugin.precision)),
        choices=runnable(trainer.strategy.root_device),
        scale=record.scale,
        fitting=record.scale if largest is None else fitting_scale(largest, spare_bits=0, lowest=-126),
        is_finite=rerun.is_finite,
    )


def _with_remedies(found: Explained, tried: Sequence[Remedy]) -> Explained:
    by_scale = [remedy.kind for remedy in tried if remedy.worked and remedy.kind in ("scale", "divisor")]
    report = replace(found.report, remedies=tuple(tried))
    return found._replace(report=report, key=by_scale[-1] if by_scale else found.key)


def _edited(step: KeptBatch) -> str:
    if step.is_intact:
        return ""
    return (
        "the step edited its batch in place, so that the replay saw an edited one; from the next batch on it is copied"
    )


def _unseen(names: Sequence[str]) -> str:
    """Say what cannot be looked into."""
    listed = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return listed and f"{listed} is compiled by TorchScript, which cannot be looked into"
