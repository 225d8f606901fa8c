"""Find out why a step was skipped: run its batches again, also in fp32, and try remedies."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._text import named
from lightning_amp.casting import Choice, Fp32Modules, our_name, runnable
from lightning_amp.causes._bad_shards import bad_shards
from lightning_amp.causes.overflow._blame import Blame, blame, blame_without_fp32, key_with_fp32, key_without_fp32
from lightning_amp.causes.overflow._everybody import Explained, try_together
from lightning_amp.causes.overflow._remedies import Case, calls_like, modules_after, try_remedies
from lightning_amp.findings import Remedy, StepRecord
from lightning_amp.numerics import (
    HALF_DTYPES,
    all_finite,
    fitting_scale,
    largest_finite,
    nonfinite_gradients,
    stack_scalars,
)
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import OverflowReport, ScaleIs, cause_of
from lightning_amp.shadow import (
    BOUNDARY,
    BatchWindow,
    Failure,
    KeptBatch,
    Lockstep,
    OtherRankFailedError,
    TrainingPass,
    gather,
    is_sharded,
)
from lightning_amp.tracing import Diagnosis, Edit, GradientPlace, OperationWatch, Place, Trace, diagnose, magnitudes


def blank_report(
    trainer: Trainer, module: LightningModule, window: BatchWindow, record: StepRecord, weight_at_start: float | None
) -> OverflowReport:
    """Return the report of a step with those fields that need no replay."""
    first, last = window.span
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
        largest_weights=None if weight_at_start is None else (weight_at_start, largest_weight(trainer, module)),
        scale_is=_scale_is(getattr(trainer.precision_plugin, "scaler", None), record),
    )


def _scale_is(scaler: torch.amp.GradScaler | None, record: StepRecord) -> ScaleIs:
    if scaler is None or record.precision != "fp16":
        return ""
    lowest = getattr(scaler, "min_scale", 0.0)
    if scaler.get_backoff_factor() >= 1 or lowest == getattr(scaler, "max_scale", None):
        return "static"
    return "lowest" if record.scale <= lowest else "dynamic"


def largest_weight(trainer: Trainer, module: LightningModule) -> float:
    """Return the largest magnitude of the trained parameters; all ranks must call. This waits for the device."""
    found = [largest_finite(p.detach()) for p in module.parameters() if p.numel() and p.requires_grad]
    mine = float(stack_scalars(found).max()) if found else 0.0
    return max(gather(trainer, mine)) if is_sharded(trainer) else mine


def explain(
    trainer: Trainer,
    module: LightningModule,
    window: BatchWindow,
    report: OverflowReport,
    known: Collection[str] = (),
) -> Explained:
    """Run the batches of a window again until one is not finite, and complete a report.

    This never raises and changes nothing. All ranks must call it. All of them run the same number of passes, whatever
    each of them finds. If the key of the cause is in `known`, neither a run in fp32 nor remedies follow.
    """
    ranks, record, device = Lockstep(trainer), report.record, trainer.strategy.root_device
    steps = list(window.kept)
    steps = steps[-min(gather(trainer, len(steps))) :]
    found: Explained | None = None
    number, step, note = 0, steps[-1], _edited(steps[-1])
    bad_parameters = bad_shards(trainer, module)
    with ExitStack() as stack:

        def start() -> TrainingPass:
            return stack.enter_context(closing(TrainingPass(trainer, module)))

        try:
            replay = ranks.run(start)
            for number, step in enumerate(steps, start=1):
                run = ranks.run(partial(_run_as_it_was, replay, step, record.scale, bad_parameters))
                note, is_new = "; ".join(filter(None, (_edited(step), _unseen(run.unseen)))), False
                is_first = found is None and run.found.cause != "none"
                if is_first:
                    found = _on_its_rank(_without_fp32(report, run, step, number, note), bad_parameters)
                    is_new = found.key not in known
                is_origin = is_first and found is not None and not found.is_received
                if ranks.any(is_origin):  # its report is enough
                    is_new &= is_origin
                if ranks.any(is_new):
                    in_fp32 = ranks.run(partial(_run_in_fp32, trainer, module, replay, step, run))
                    scale = 1.0 if report.scale_is == "dynamic" else record.scale
                    rerun = _Rerun(trainer.precision_plugin, device.type, replay, step, scale)
                    look = partial(
                        _blamed, trainer, module, found if is_new else None, rerun, run, in_fp32, bad_parameters
                    )
                    if bad_parameters is not None:
                        blamed, case = ranks.run(look)
                        tried = try_together(trainer, ranks, rerun.is_finite, blamed, case)
                    else:
                        with ranks.until_all_are_done(rerun.is_finite):
                            blamed, case = look()
                            tried = [] if case is None else try_remedies(ranks, case)
                    if blamed is not None:
                        found = _with_remedies(blamed, tried)
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


def _blamed(
    trainer: Trainer,
    module: LightningModule,
    found: Explained | None,
    rerun: _Rerun,
    run: _StepAsItWas,
    in_fp32: _StepInFp32 | Failure,
    bad_parameters: Mapping[str, tuple[int, str]] | None,
) -> tuple[Explained | None, Case | None]:
    """Complete the diagnosis of this rank, if it has a new one, and return the case for which remedies are tried."""
    if found is None:
        return None, None
    found, blamed = _with_fp32(found, rerun.replay.module, run, in_fp32, rerun.step, bad_parameters)
    if isinstance(in_fp32, Failure) and in_fp32.out_of_memory:
        return found, None
    return found, _case(trainer, module, found.report.record, blamed, run, in_fp32, rerun)


def _with_remedies(found: Explained, tried: list[Remedy]) -> Explained:
    by_scale = [remedy.kind for remedy in tried if remedy.worked and remedy.kind in ("scale", "divisor")]
    report = replace(found.report, remedies=tuple(tried))
    return found._replace(report=report, key=by_scale[-1] if by_scale else found.key)


def _not_found(report: OverflowReport, step: KeptBatch, number: int, note: str) -> Explained:
    report = replace(report, batch_idx=step.batch_idx, num_replayed=number, note=note)
    return Explained(report, f"{report.cause}: {note}")


def _without_fp32(report: OverflowReport, run: _StepAsItWas, step: KeptBatch, number: int, note: str) -> Explained:
    report = replace(
        report,
        cause=cause_of(run.found),
        diagnosis=run.found,
        batch_idx=step.batch_idx,
        num_replayed=number,
        parameters=report.parameters or run.parameters,
        note=note,
    )
    return Explained(report, key_without_fp32(run.found, run.watch), _begins(run), _is_received(run))


def _is_received(run: _StepAsItWas) -> bool:
    """Return whether the first values that were not finite came from another rank, by a collective operation."""
    cause, watch = run.found.cause, run.watch
    if cause == "backward":
        first = watch.first_backward
        inside = [call for call in watch.bad_in_backward if not call.sources][:1]
        return first is not None and not first.is_sum and any(one.is_collective for one in (first.call, *inside))
    if cause not in ("forward", "loss"):
        return False
    roots = watch.bad if watch.made_loss is None else watch.made_loss.roots
    wrong = next((call for call in roots if call.facts.kind != "literal"), None)
    return wrong is not None and wrong.is_collective and not wrong.sources


def _begins(run: _StepAsItWas) -> float:
    """Return the place of the first fault in the order of operations: the backward follows the forward, in reverse."""
    watch = run.watch
    if run.found.cause in ("weights", "batch"):
        return -1
    if run.found.cause == "backward":
        return math.inf if watch.first_backward is None else 1e9 - watch.first_backward.call.number
    return min((call.number for call in watch.bad), default=math.inf)


def _with_fp32(
    found: Explained,
    module: LightningModule,
    run: _StepAsItWas,
    in_fp32: _StepInFp32 | Failure,
    step: KeptBatch,
    bad_parameters: Mapping[str, tuple[int, str]] | None,
) -> tuple[Explained, Blame]:
    """Complete the diagnosis by the run in fp32, and name the operation that made the difference."""
    report = found.report
    if isinstance(in_fp32, Failure):
        blamed = blame_without_fp32(module, run.found, run.watch)
        if "modified by an inplace operation" not in in_fp32.reason:
            note = f"it could not be run in fp32 ({in_fp32.reason})"
            report = replace(report, note="; ".join(filter(None, (report.note, note))))
    else:
        blamed = blame(module, run.found, run.watch, in_fp32.found, in_fp32.watch, step.batch, bad_parameters)
        if report.cause == "backward":
            report = replace(report, largest_gradient=in_fp32.largest)
    report = replace(report, diagnosis=blamed.diagnosis, cause=cause_of(blamed.diagnosis))
    operation = blamed.diagnosis.operation
    is_received = (
        found.is_received
        or (operation is not None and operation.kind == "outside")
        or (isinstance(in_fp32, _StepInFp32) and in_fp32.may_be_of_others)
    )
    found = found._replace(report=report, key=key_with_fp32(blamed.diagnosis, found.key), is_received=is_received)
    return _on_its_rank(found, bad_parameters), blamed


def _on_its_rank(found: Explained, bad_parameters: Mapping[str, tuple[int, str]] | None) -> Explained:
    """Name the rank and the shard of a parameter that is not finite: all ranks gather its values."""
    where = (bad_parameters or {}).get(found.report.diagnosis.parameter or "")
    if found.report.cause != "weights" or where is None:
        return found
    rank, shard = where
    return found._replace(report=replace(found.report, rank=rank, shard=shard), begins=-1)


def _case(
    trainer: Trainer,
    module: LightningModule,
    record: StepRecord,
    blamed: Blame,
    run: _StepAsItWas,
    in_fp32: _StepInFp32 | Failure,
    rerun: _Rerun,
) -> Case:
    call, largest = blamed.call, None if isinstance(in_fp32, Failure) else in_fp32.largest
    if blamed.is_swallowed and isinstance(in_fp32, _StepInFp32):
        rerun = replace(rerun, fp32_watch=in_fp32.watch)
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


def _edited(step: KeptBatch) -> str:
    if step.is_intact:
        return ""
    return (
        "the step edited its batch in place, so that the replay saw an edited one; from the next batch on it is copied"
    )


def _unseen(names: Sequence[str]) -> str:
    """Name the modules inside which operations cannot be watched."""
    return f"{named(names)} is compiled by TorchScript, which cannot be looked into" if names else ""


# -- runs of the step --------------------------------------------------------------------------------------------------


@final
class _StepAsItWas(NamedTuple):
    """A step that was run again with the same weights, batch, random numbers and loss scale."""

    found: Diagnosis
    watch: OperationWatch
    half_places: set[GradientPlace]  # places where the step computed gradients in half precision
    parameters: tuple[str, ...]  # parameters with gradients that are not finite
    unseen: list[str]  # modules inside which operations cannot be watched


def _run_as_it_was(
    replay: TrainingPass, step: KeptBatch, scale: float, bad_parameters: Collection[str] | None
) -> _StepAsItWas:
    trace = Trace(replay.module, bad_parameters=bad_parameters)
    watch = OperationWatch(replay.module, BOUNDARY)
    loss = replay.run(
        step.batch,
        step.batch_idx,
        context=replay.forward_context(),
        random_state=step.random_state,
        scale=scale,
        trace=trace,
        watch=watch,
    )
    found = diagnose(trace, loss, step.batch)
    parameters: tuple[str, ...] = ()
    if found.cause != "none":
        parameters = nonfinite_gradients(_modules.plain_parameters(replay.module))
    replay.forget_gradients()
    return _StepAsItWas(found, watch, trace.half_places, parameters, trace.unseen)


@final
class _StepInFp32(NamedTuple):
    """A step that was run in fp32."""

    found: Diagnosis  # an intended mask is not a cause
    watch: OperationWatch
    largest: float | None  # the largest true gradient that has to fit into fp16
    may_be_of_others: bool  # only gradients that are sums over the ranks were not finite


def _run_in_fp32(
    trainer: Trainer, module: LightningModule, replay: TrainingPass, step: KeptBatch, as_it_was: _StepAsItWas
) -> _StepInFp32 | Failure:
    """Run a step in fp32, without the casts to half precision in the user's code. Never raises.

    It uses the same pass again if no weight is in half precision or gathered in it, and measures the operations that
    were not finite.
    """
    try:
        fp32_pass, amp_watch = replay, as_it_was.watch
        if replay.gathers_in_half or any(parameter.dtype in HALF_DTYPES for parameter in module.parameters()):
            fp32_pass = TrainingPass(trainer, module, upcast=True)
        wanted = [call.key for call in amp_watch.bad]
        if amp_watch.first_backward is not None:
            wanted.append(amp_watch.first_backward.call.key)
        trace, watch = Trace(fp32_pass.module), OperationWatch(fp32_pass.module, BOUNDARY, wanted)
        try:
            loss = fp32_pass.run(
                step.batch, step.batch_idx, context=None, random_state=step.random_state, trace=trace, watch=watch
            )
            found = diagnose(trace, loss, step.batch)
            is_added_up = found.cause == "none" and bool(
                nonfinite_gradients(_modules.plain_parameters(fp32_pass.module))
            )
            if is_added_up:
                found = Diagnosis("backward", where="parameter")
            sizes = magnitudes(trace.gradients_in_half(as_it_was.half_places))
            largest = max(sizes, key=lambda size: (math.isnan(size), size), default=None)
            return _StepInFp32(found, watch, largest, is_added_up and is_sharded(trainer))
        finally:
            fp32_pass.forget_gradients()
            if fp32_pass is not replay:
                fp32_pass.close()
    except Exception as error:
        return Failure.of(error, "the training step", "the replay in fp32")


@final
@dataclass(frozen=True, slots=True)
class _Rerun:
    """Runs a failed step again, with a remedy.

    `fp32_watch` is given if loss and gradients are finite despite the fault. A remedy then fails if a new NaN or
    infinity occurs.
    """

    plugin: Precision
    device_type: str
    replay: TrainingPass
    step: KeptBatch
    scale: float  # if a lower scale is not a remedy, the scale at which the step overflows least
    fp32_watch: OperationWatch | None = None

    def is_finite(
        self,
        *,
        precision: str = "",
        rules: Sequence[str] = (),
        edits: Mapping[tuple[str, Place | None], Edit] | None = None,
        scale: float | None = None,
    ) -> bool:
        """Return whether loss and gradients are finite with these changes. Never raises."""
        replay, active, fp32_watch = self.replay, None, self.fp32_watch
        try:
            context = replay.forward_context()
            if precision and isinstance(self.plugin, AmpPrecision):
                context = self.plugin.forward_context_of(precision)
            if rules:
                active = Fp32Modules(replay.module, rules, self.device_type, active=True)
            watch: OperationWatch | None = None
            if edits or fp32_watch is not None:
                watch = OperationWatch(replay.module, BOUNDARY, edits=edits or {}, only_edits=fp32_watch is None)
            loss = replay.run(
                self.step.batch,
                self.step.batch_idx,
                context=context,
                random_state=self.step.random_state,
                scale=self.scale if scale is None else scale,
                watch=watch,
            )
            if watch is not None and fp32_watch is not None:
                bad_in_fp32 = {call.key for call in fp32_watch.bad}
                if any(call.makes_nan and call.key not in bad_in_fp32 for call in watch.bad):
                    return False
            is_finite = loss is None or bool(all_finite([loss]))
            return is_finite and not nonfinite_gradients(_modules.plain_parameters(replay.module))
        except Exception:  # a remedy that cannot be run here does not work
            return False
        finally:
            replay.forget_gradients()
            if active is not None:
                active.remove()
