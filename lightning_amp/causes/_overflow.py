"""Find out why a step was skipped: run its batches again, also in fp32, and try at most three kinds of remedies."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp._text import exact, literal
from lightning_amp.casting import Fp32Modules, runnable
from lightning_amp.causes._lost_precision import settled_scale
from lightning_amp.causes._nonfinite import bad_shards
from lightning_amp.findings import StepRecord, TriedRemedy
from lightning_amp.numerics import (
    FP16_LARGEST,
    dense,
    extremes,
    fidelity,
    fidelity_sums,
    fitting_scale,
    names_of_nonfinite,
    nonfinite_gradients,
    stack_scalars,
)
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import Overflow, ScaleIs
from lightning_amp.shadow import (
    BOUNDARY,
    BatchWindow,
    Failure,
    KeptBatch,
    OtherRankFailedError,
    TrainingPass,
    gather,
    is_sharded,
    tensor_parallel_size,
    together,
)
from lightning_amp.tracing import (
    Call,
    Gradient,
    Trace,
    bad_entries,
    described,
    first_bad,
    first_difference,
    has_fault,
    is_received,
    maker_module,
    taking_modules,
)

_SCALES = (1.0, 2.0**-10, 2.0**-20)
"""Loss scales at which a finite forward runs again; at the last one every gradient fits that is finite at all."""
_GROWN = ("typical", 30.0, 0.1), ("largest", 100.0, 1.0)
"""Weights, how many times their start they grow in a run that diverges, and the least start to count from."""
RECEIVED = 2**62
"""The position of a fault whose first bad values came from another rank."""

Trial = tuple[str, dict[str, Any]]
"""A remedy to try: the setting in words, and how the step runs with it."""


def weight_sizes(trainer: Trainer, module: LightningModule) -> tuple[float, float]:
    """Return the median RMS of the trained matrices, and the largest magnitude of the trained parameters.

    The median sees a transformer that diverges: the weight of a norm, 1 at the start, hides how other weights grow. A
    head that has to reach large targets does not move it. All ranks must call this. It waits for the device.
    """
    trained = [values for p in module.parameters() if p.requires_grad and (values := dense(p.detach())).numel()]
    matrices = [values for values in trained if values.ndim > 1] or trained  # FSDP1 flattens them
    sizes = [torch.linalg.vector_norm(values).float() / values.numel() ** 0.5 for values in matrices]
    typical = float(stack_scalars(sizes).median()) if len(sizes) > 1 else 0.0
    ends = [end.abs() for values in trained for end in extremes(values)]
    largest = float(stack_scalars(ends).max()) if ends else 0.0
    return max(gather(trainer, (typical, largest))) if is_sharded(trainer) else (typical, largest)


def weight_growth(
    trainer: Trainer, module: LightningModule, at_start: tuple[float, float] | None
) -> tuple[str, float, float] | None:
    """Return which weights have grown by orders of magnitude, and their size at the start and now.

    All ranks must call this.
    """
    now = at_start and weight_sizes(trainer, module)
    for (which, times, least), before, size in zip(_GROWN, at_start or (), now or (), strict=False):
        if math.isfinite(size) and size > times * max(before, least):
            return which, before, size
    return None


def explain(
    trainer: Trainer, module: LightningModule, window: BatchWindow, record: StepRecord,
    weights_at_start: tuple[float, float] | None, known: Collection[str],
) -> Overflow:  # fmt: skip
    """Run the batches of a window again until one is not finite, and report the cause.

    This changes nothing. All ranks must call it. All of them run the same number of passes, whatever each of them
    finds. If the key of the cause is in `known`, neither a run in fp32 nor remedies follow.
    """
    steps = list(window.kept)[-min(gather(trainer, len(window.kept))) :]
    first, last = window.span
    report = Overflow(
        record=record,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        epoch=trainer.current_epoch,
        batch_idx=last,
        window=(first, last),
        parameters=nonfinite_gradients(_modules.plain_parameters(module)),
        growth=weight_growth(trainer, module, weights_at_start),
        scale_is=_scale_is(getattr(trainer.precision_plugin, "scaler", None), record),
        note=_edited(steps[-1]),
    )
    search = _Search(trainer, module, report, bad_shards(trainer, module))
    try:
        return search.explain(steps, known)
    except Exception as error:
        if search.found is not None:
            return search.found
        if isinstance(error, OtherRankFailedError):
            return report
        failure = Failure.of(error, "the training step", "the replay")
        too_large = ": there is no cause to report. A smaller batch needs less" * failure.out_of_memory
        return replace(report, note=failure.text + too_large)


def _scale_is(scaler: torch.amp.GradScaler | None, record: StepRecord) -> ScaleIs:
    if scaler is None or record.precision != "fp16":
        return ""
    lowest = getattr(scaler, "min_scale", 0.0)
    if lowest == getattr(scaler, "max_scale", None):
        return "static"
    return "lowest" if record.scale <= lowest else "dynamic"


@final
class _Run(NamedTuple):
    """One run of a step."""

    trace: Trace
    loss: float | None
    parameters: tuple[str, ...]  # parameters with gradients that are not finite
    is_bad: bool  # gradients of operations do not count, because a ReLU may drop them
    gradients: Mapping[str, Tensor]  # of a finite run


Found = tuple[Overflow, list[Trial], _Run]
"""A report, the remedies to try, and the run with whose loss they are compared."""


@final
@dataclass
class _Search:
    """The search for the cause of one skipped step, on all ranks together.

    Each run has a copy of the module of its own, because a step may write to buffers, such as a queue of keys.
    """

    _trainer: Trainer
    _module: LightningModule
    _blank: Overflow
    _elsewhere: Mapping[str, tuple[int, str]] | None  # bad parameters of a sharded module
    found: Overflow | None = None  # as the step itself showed it

    def explain(self, steps: Sequence[KeptBatch], known: Collection[str]) -> Overflow:
        """Run the step as it was, at a lower scale, in fp32 and with remedies, as far as a rank needs it."""
        report, run, step = self._as_it_was(steps[0], 1)
        for number, later in enumerate(steps[1:], start=2):
            if all(gather(self._trainer, report.cause != "not reproduced")):
                break
            seen = self._as_it_was(later, number)
            report, run, step = seen if report.cause == "not reproduced" else (report, run, step)
        self.found = report
        is_new = report.cause != "not reproduced" and report.key not in known
        is_origin = report.cause != "not reproduced" and report.position != RECEIVED
        if any(gather(self._trainer, is_origin)):  # its report is enough
            is_new &= is_origin
        is_early = is_new and has_fault(run.trace)
        report, trials, reference = self._in_fp32(report, run, step, is_wanted=is_early)
        is_backward = report.cause == "backward" and report.in_fp32 != "not finite"
        is_scale = is_new and is_backward and self._blank.record.precision == "fp16"
        for scale in _SCALES:
            is_scale &= report.fitting_scale is None
            if any(gather(self._trainer, is_scale)):
                with together(self._trainer, agree=True):
                    lower = self._run(step, scale=scale)
                if is_scale and not lower.is_bad:
                    report = self._fits(report, lower, step, scale)
                    trials = [] if report.is_harmless else [self._lower_scale(report), *self._bf16()]
        is_late = is_new and not is_early and report.fitting_scale is None
        late = self._in_fp32(report, run, step, is_wanted=is_late)
        report, trials, reference = late if is_late else (report, trials, reference)
        is_new &= report.key not in known
        return self._try_all(report, trials if is_new else None, step, reference)

    # -- what one run shows --------------------------------------------------------------------------------------------

    def _as_it_was(self, step: KeptBatch, number: int) -> tuple[Overflow, _Run, KeptBatch]:
        """Run a step as training did, and name its cause if it is not finite."""
        with together(self._trainer, agree=True):
            run = self._run(step, scale=self._blank.record.scale)
            report = replace(self._blank, num_replayed=number)
            is_auto = self._module.automatic_optimization  # otherwise a step may have several losses
            if is_auto and self._blank.record.reason == "gradient" and run.trace.bad_loss is not None:
                report = replace(report, note="the loss is finite in the step, and not in the replay")
            elif run.is_bad:
                parameters = report.parameters or run.parameters
                report = replace(report, batch_idx=step.batch_idx, parameters=parameters, note=_edited(step))
                report = self._named(report, first_bad(run.trace), run, step)
        return report, run, step

    def _named(
        self, report: Overflow, found: Call | Gradient | None, run: _Run, step: KeptBatch, fp32_run: _Run | None = None
    ) -> Overflow:
        """Name the cause, the module and the operation."""
        if found is None:
            is_bad_loss = run.trace.bad_loss is not None
            # of a sharded module, the gradients of a parameter are sums over the ranks
            is_sum = not is_bad_loss and is_sharded(self._trainer)
            owner = "" if is_bad_loss else next(iter(run.parameters), "").rpartition(".")[0]
            report = replace(report, cause="loss" if is_bad_loss else "backward", module=owner or None)
            return self._from_outside(replace(report, position=RECEIVED if is_sum else RECEIVED - 1), step, None)
        op = described(found, run.trace, None if fp32_run is None else fp32_run.trace)
        if isinstance(found, Call):
            takers, module, begins = taking_modules(found, run.trace), op.module, found.number
            cause = "forward" if module or takers else "loss"
        else:  # the backward runs after the forward, in reverse
            takers, module, begins = [], maker_module(found.call), 10**9 - found.call.number
            cause = "backward"
        begins = RECEIVED if is_received(found, run.trace) else begins
        report = replace(report, cause=cause, module=module or None, operation=op, position=begins)
        if fp32_run is None and isinstance(found, Call) and found.takes_from_outside and not found.is_collective:
            outside = [call.module for call in run.trace.calls if call.takes_from_outside and call.module]
            return self._from_outside(replace(report, module=next(iter([*outside, *takers]), None)), step, op.module)
        return report

    def _from_outside(self, report: Overflow, step: KeptBatch, module: str | None) -> Overflow:
        """Find the parameter, buffer or part of the batch that was not finite before the step."""
        states = [*self._module.named_buffers()]
        states += [] if self._elsewhere is not None else [*self._module.named_parameters()]
        bad = [*(self._elsewhere or ()), *names_of_nonfinite(states)]
        near = [name for name in bad if module and name.startswith(f"{module}.")]
        entries = bad_entries(step.batch)
        if near or (bad and not entries):
            parameter = (near or bad)[0]
            rank, shard = (self._elsewhere or {}).get(parameter, (report.rank, ""))
            by_hand = "code that changes weights by hand must call `unscale_` before, because gradients are scaled"
            note = report.note if self._module.automatic_optimization or not report.scale_is else by_hand
            return replace(
                report, cause="weights", parameter=parameter, module=module, operation=None, rank=rank, shard=shard,
                position=-1, is_buffer=parameter in dict(self._module.named_buffers()), note=note,
            )  # fmt: skip
        if entries:
            return replace(report, cause="batch", entries=entries, operation=None, position=-1)
        return report if report.operation is None else replace(report, position=RECEIVED)

    def _fits(self, report: Overflow, run: _Run, step: KeptBatch, scale: float) -> Overflow:
        """Name the loss scale at which the largest gradient of a finite run fits, and where gradients become larger."""
        largest, now = (run.trace.largest_in_half() or 0.0) / scale, self._blank.record.scale
        fitting = fitting_scale(largest, spare_bits=0, lowest=-126) if largest else scale
        report = replace(report, fitting_scale=min(fitting, now / 2), largest_gradient=largest)
        least = FP16_LARGEST * scale / (1.0 if report.scale_is == "dynamic" else now)
        found = next((one for one in run.trace.in_half() if (one.computed.largest or 0.0) > least), None)
        if found is None:
            return report
        report, size = self._named(report, found, run, step), (found.computed.largest or 0.0) / scale
        return replace(report, operation=report.operation and replace(report.operation, largest_in_fp32=size))

    def _in_fp32(self, report: Overflow, run: _Run, step: KeptBatch, *, is_wanted: bool) -> Found:
        """Run the step in fp32 if a rank wants it, and complete a wanted report."""
        if any(gather(self._trainer, is_wanted)):
            with together(self._trainer, agree=True):
                fp32_run, note = self._run_in_fp32(step)
                if is_wanted:
                    report = replace(report, note="; ".join(filter(None, (report.note, note))))
                    return (report, [], run) if fp32_run is None else self._completed(report, run, fp32_run, step)
        return report, [], run

    def _completed(self, report: Overflow, run: _Run, fp32_run: _Run, step: KeptBatch) -> Found:
        """Complete a report by the run in fp32, and choose the remedies to try."""
        if fp32_run.is_bad:
            is_taken = report.record.skipped and not fp32_run.parameters
            report = replace(report, in_fp32="finite gradients" if is_taken else "not finite", entries=())
            return self._named(report, first_bad(fp32_run.trace), fp32_run, step), [], fp32_run
        report = replace(report, in_fp32="finite", parameter="", entries=())
        found = first_difference(run.trace, fp32_run.trace) or first_bad(run.trace)
        report = self._named(report, found, run, step, fp32_run)
        return report, self._trials(found.call if isinstance(found, Gradient) else found, run), fp32_run

    def _run_in_fp32(self, step: KeptBatch) -> tuple[_Run | None, str]:
        """Run the step in fp32, also where the user's code casts to half precision; return a note too. Never raises."""
        try:
            with closing(TrainingPass(self._trainer, self._module, upcast=True)) as replay:
                run = self._traced(replay, Trace(replay.module, BOUNDARY), step, context=None)
                return run, "".join(replay.notes)
        except Exception as error:
            reason = Failure.of(error, "the training step", "the replay in fp32").reason
            # in fp32, `x.float()` is `x` itself, so that an edit in place may be an error there
            return None, "" if "modified by an inplace" in reason else f"it could not be run in fp32 ({reason})"

    # -- remedies ------------------------------------------------------------------------------------------------------

    def _trials(self, call: Call | None, run: _Run) -> list[Trial]:
        """Choose remedies: bf16; the modules that make the value, and take it, in fp32; the loss in fp32."""
        trials = self._bf16()
        if call is None or self._blank.record.precision == "fp32":
            return trials
        known = {_modules.plain_name(name) for name, _ in self._module.named_modules() if name}
        names = [maker_module(call), *taking_modules(call, run.trace)]
        around = [name for name in dict.fromkeys(names) if name in known]
        for rules in dict.fromkeys(tuple(around[:count]) for count in (1, 2) if around[count - 1 :]):
            trials.append((f"fp32_modules={json.dumps(rules)}", {"rules": rules}))
        loss = (
            "the loss in fp32, with all code outside of submodules (`fp32_region()`, float32 inputs, no casts to half)",
            {"loss_in_fp32": True},
        )
        return trials if call.module else [*trials, loss]

    def _bf16(self) -> list[Trial]:
        can_try = self._blank.record.precision == "fp16" and "bf16" in runnable(self._trainer.strategy.root_device)
        return [('AmpPrecision("bf16")', {"precision": "bf16"})] * can_try

    def _lower_scale(self, report: Overflow) -> Trial:
        scale = (report.fitting_scale or 1.0) / 4
        setting = "scaler={}" if report.scale_is == "static" else "DynamicLossScaler(init_scale={})"
        now = self._blank.record.scale
        size = exact(max(now, settled_scale(self._trainer, now)) / scale)
        divided = f"dividing the loss by {size} or more, and the `eps` of Adam too"
        return setting.format(literal(scale)) if scale >= 1 else divided, {"scale": scale}

    def _try_all(self, report: Overflow, trials: list[Trial] | None, step: KeptBatch, reference: _Run) -> Overflow:
        """Try the remedies of each cause on all ranks; a rank that has another fault runs too, but does not count."""
        mine = None if trials is None else report.key
        plans: dict[str | None, list[Trial]] = {}
        for key, plan in gather(self._trainer, (mine, trials or [])):
            plans.setdefault(key, plan)
        for key, plan in plans.items():
            tried, also = dict[tuple[str, ...], TriedRemedy](), ""
            for setting, how in plan:
                kind = tuple(how)
                if kind in tried and tried[kind].works:  # such as more modules than are needed
                    continue
                with together(self._trainer, agree=True):
                    works = self._works(step, reference, **how)
                works, now = min(gather(self._trainer, works if key == mine else math.inf)), self._blank.record.scale
                if 1 <= works < now and how.keys() & {"rules", "loss_in_fp32"}:
                    also = f"with {setting.partition(', with')[0]}, steps are skipped until the scale is {exact(works)}"
                tried[kind] = TriedRemedy(setting, works > 0)  # instead of fewer modules, which did not help
            if key == mine:
                note = "; ".join(filter(None, (report.note, also)))
                report = replace(report, remedies=tuple(tried.values()), note=note)
        return report

    def _works(self, step: KeptBatch, reference: _Run, rules: Sequence[str] = (), **how: Any) -> float:
        """Return up to which loss scale loss and gradients are finite with a remedy, and as in the reference.

        The loss must be equal within rounding, and the error of the gradient must be smaller than the gradient. It is 0
        if the remedy does not work. Never raises.
        """
        scale: float = how.setdefault("scale", settled_scale(self._trainer, self._blank.record.scale))
        try:
            run = self._run(step, rules=rules, fp32_draws=True, **how)
        except Exception:  # a remedy that cannot be run here does not work
            return 0.0
        fits = 0.0 if run.is_bad else fitting_scale((run.trace.largest_in_half() or 0.0) / scale, 0, -126)
        known = {} if run.is_bad or is_sharded(self._trainer) else reference.gradients
        sums = [fidelity_sums(g, run.gradients.get(name, torch.zeros_like(g))) for name, g in known.items()]
        if sums and fidelity(torch.stack(sums).sum(0))[0] < 0:
            return 0.0
        if not fits or run.loss is None or reference.loss is None:
            return fits
        name = how.get("precision") or self._blank.record.precision
        eps = torch.finfo({"fp16": torch.float16, "fp32": torch.float32}.get(name, torch.bfloat16)).eps
        made_by = next((loss.maker for loss in reference.trace.losses if loss.maker is not None), None)
        magnitude = (made_by.largest_input if made_by is not None else None) or 0.0
        return fits * (abs(run.loss - reference.loss) <= eps * (32 * abs(reference.loss) + 2 * magnitude))

    def _run(
        self, step: KeptBatch, *, precision: str = "", loss_in_fp32: bool = False, rules: Sequence[str] = (), **how: Any
    ) -> _Run:
        """Run the step as training does, or in another precision, at another scale or with modules in fp32."""
        plugin = cast(AmpPrecision, self._trainer.precision_plugin)  # only it says which steps it skips
        with closing(TrainingPass(self._trainer, self._module)) as replay:
            if rules:
                Fp32Modules(replay.module, rules, self._trainer.strategy.root_device.type, active=True)
            trace = Trace(replay.module, BOUNDARY, loss_in_fp32=loss_in_fp32)
            return self._traced(replay, trace, step, context=plugin.forward_context_of(precision), **how)

    def _traced(self, replay: TrainingPass, trace: Trace, step: KeptBatch, **how: Any) -> _Run:
        loss = replay.run(step.batch, step.batch_idx, random_state=step.random_state, trace=trace, **how)
        gradients, read = replay.gradients(), trace.read()
        parameters = names_of_nonfinite(gradients.items())
        is_bad = read.bad_loss is not None or bool(parameters)
        if is_sharded(self._trainer):  # a parameter's gradient may be bad on another rank only
            is_bad |= any(gradient.bad for gradient in read.gradients)
        size = None if loss is None else float(loss.float().mean())
        return _Run(read, size, parameters, is_bad, {} if is_bad else gradients)


def origins(trainer: Trainer, found: Sequence[Overflow]) -> list[Overflow]:
    """Leave out reports that describe the consequence of a fault on another rank.

    A step may exchange values with the other ranks by itself, for example in a contrastive loss. Ranks that differ only
    in tensor parallelism compute with the same batch and exchange activations: the fault began where the first
    operation failed.
    """
    found = [one for one in found if one.position != RECEIVED] or list(found)
    if not is_sharded(trainer):
        return found
    size = tensor_parallel_size(trainer)
    kept: dict[tuple[int, str], Overflow] = {}
    for group in dict.fromkeys(one.rank // size for one in found):
        inside = [one for one in found if one.rank // size == group]
        first = min(one.position for one in inside)
        causes = [one for one in inside if one.position == first]
        for one in causes[:1] if len(causes) == size else causes:
            shard = one.shard
            if size > len(causes) and not shard:
                shard = f"shard {one.rank % size} of {size} in mesh dimension `tensor_parallel`"
            kept.setdefault((one.rank, one.key), replace(one, shard=shard))
    return list(kept.values())


def _edited(step: KeptBatch) -> str:
    edited = "the step edited its batch in place, so that the replay saw an edited one; the next batches are copied"
    return "" if step.is_intact else edited
