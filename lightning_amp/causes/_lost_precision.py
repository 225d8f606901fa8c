"""Find the module whose output is furthest from fp32 although its inputs are close, and try it in fp32.

`MetricComparison` and `GradientMonitor` ask the same question of a second run in both precisions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch

from lightning_amp._compat._names import LightningModule, Trainer
from lightning_amp._text import exact, literal
from lightning_amp.casting import Fp32Modules
from lightning_amp.findings import (
    LOST_DB,
    WRONG_DB,
    ComparisonRow,
    GradientSample,
    LostPrecision,
    ModuleSums,
    TriedRemedy,
    bits_kept,
    describe_tried,
    worst_db,
)
from lightning_amp.shadow import (
    EvaluationPass,
    GradientSampler,
    OutputComparison,
    PairedEvaluation,
    Precision,
    gather,
    precision_of,
    together,
)
from lightning_amp.tracing import paired_random

_ONE_BIT_DB = 6.02  # the least that the output of a module must lose
_GONE = 0.25  # a setting works if at most this share of the difference remains


def furthest_module(modules: Mapping[str, ModuleSums], precision: str) -> LostPrecision | None:
    """Return the module whose output is furthest from fp32 although its inputs are close; `None` if there is none.

    The module without a name stands for the step, and is left out. Of modules that lose nearly as much, the first one
    that ended is returned, so an inner one.
    """
    found = [
        LostPrecision(name, one.kind, precision, worst_db(one.inputs), worst_db(one.outputs))
        for name, one in modules.items()
        if name and worst_db(one.outputs) < worst_db(one.inputs) - _ONE_BIT_DB
    ]
    least = min((one.output_sqnr_db for one in found), default=0.0)
    return next((one for one in found if one.output_sqnr_db <= least + _ONE_BIT_DB), None)


def lost_in_evaluation(
    trainer: Trainer, module: LightningModule, compared: PairedEvaluation, row: ComparisonRow
) -> LostPrecision | None:
    """Run the kept batches again in both precisions, find the module that loses most, and try two settings.

    It returns `None` if these batches do not show the difference of the row, or cannot run again. All ranks must call
    this.

    Cost: an evaluation step in fp32 and three more for each kept batch, 8 of a loader at most.
    """
    if not all(gather(trainer, bool(compared.kept))):
        return None

    run = partial(_evaluate, trainer, module, compared, row.metric)
    outputs, tried, found = OutputComparison(inputs=True), list[TriedRemedy](), None
    with suppress(Exception):  # such as out of memory; the difference stands in the table
        with together(trainer, agree=True):
            mine = run(("fp32", "amp"), outputs=outputs)
        sides = gather(trainer, mine)
        found = furthest_module(outputs.sums_of_all_ranks(trainer), precision_of(trainer))
        if found is None or not any(_shows(row, *side) for side in sides):
            return None
        settings: list[tuple[str, Precision, list[str]]] = [
            (f"`fp32_modules=[{found.module!r}]`", "amp", [found.module]),
            ("`eval_precision='fp32'`", "eval fp32", []),
        ]
        for setting, precision, rules in settings:
            with suppress(Exception):  # such as half-precision weights, which cannot compute in fp32
                with together(trainer, agree=True):
                    mine = run((precision,), rules=rules)
                gone = [_is_gone(value, *side) for (value,), side in zip(gather(trainer, mine), sides, strict=True)]
                tried.append(TriedRemedy(setting, all(gone)))
    return found and found._replace(tried=tuple(tried), metric=row.metric)


def _evaluate(
    trainer: Trainer, module: LightningModule, compared: PairedEvaluation, metric: str,
    precisions: Sequence[Precision], *, outputs: OutputComparison | None = None, rules: Sequence[str] = (),
) -> list[float]:  # fmt: skip
    """Run the kept batches in each precision, the last one with modules in fp32, and return the metric in each."""
    passes, kept = [EvaluationPass(trainer, module, compared.stage, one) for one in precisions], compared.kept
    device_type, mha = passes[0].device_type, torch.backends.mha
    with ExitStack() as closing, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real step already raised each of these warnings
        # the fast path of torch's transformer layers does not call their inner modules
        closing.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        closing.enter_context(paired_random(device_type))  # hooks and copies may draw random numbers, too
        for one in passes:
            closing.callback(one.close)
        if rules:
            closing.enter_context(passes[-1].active())
            Fp32Modules(passes[-1].module, rules, device_type, active=True)
        for one in passes:
            one.start_afresh()
        for batch in kept:
            for one, watch in zip(passes, (outputs and outputs.recording, outputs and outputs.comparing), strict=False):
                with paired_random(device_type, batch.random_state):
                    one.step(batch.batch, batch.batch_idx, batch.loader_idx, watch and watch(one.module))
        values = [one.finish(kept[-1].random_state).get(metric) for one in passes]
        return [math.nan if value is None else float(value) for value in values]


def _shows(row: ComparisonRow, fp32: float, amp: float) -> bool:
    """Return whether some batches show the difference of a metric over all batches."""
    return abs(amp - fp32) > 0.3 * abs(row.diff) if math.isfinite(row.amp) else not math.isfinite(amp)


def _is_gone(value: float, fp32: float, amp: float) -> bool:
    if not math.isfinite(amp):
        return math.isfinite(value) or not math.isfinite(fp32)
    return abs(value - fp32) <= _GONE * abs(amp - fp32)


def lost_in_training(trainer: Trainer, sample: GradientSample, sampler: GradientSampler, fitting_scale: float) -> str:
    """Try one setting against the lost gradient of a sample, and say whether it helps. All ranks must call this.

    In fp16 it tries another loss scale, if there is one that fits better. If that does not help, it tries the module
    that loses most of the forward in fp32, and then the module of the first lost gradient. It tries no module if values
    round to zero or overflow in the backward alone.

    Args:
        trainer: The trainer, at the start of the sampled batch.
        sample: The sample.
        sampler: Took the sample, and takes others.
        fitting_scale: The scale at which all gradients so far fit into fp16.

    Cost: two to seven steps in each precision.
    """
    row, total = sample.bad()[0], sample.rows[-1]
    overflows = math.isnan(total.sqnr_db)
    is_certain = sample.forward_is_finite and (overflows or row.rounds_to_zero)
    fits_better = fitting_scale < total.scale if overflows else fitting_scale > total.scale
    if total.precision == "fp16" and sample.forward_is_finite and fits_better:
        if row.scale == 1 != vars(trainer.precision_plugin)["scaler"].get_scale():
            return "fix: `self.manual_backward(loss)`, because `loss.backward()` carries no loss scale (not tried)"
        tried, kept = TriedRemedy("", False), ""
        for scale in dict.fromkeys((min(fitting_scale, 2.0**24), fitting_scale)):  # the default limit
            if not tried.works:
                works, kept = _effect(sample, sampler.take(scale))
                tried = TriedRemedy(_scale_setting(trainer, sample, scale), works)
        if tried.works or is_certain:
            return describe_tried([tried]) + kept
    elif is_certain:
        return "`OverflowLocator` finds the operation" if overflows else "fix: `AmpPrecision('bf16')` (not tried)"
    outputs = OutputComparison(inputs=True)
    # a scale that has not settled would overflow in the backward
    scale = min(total.scale, fitting_scale) if total.precision == "fp16" else total.scale
    sampler.take(scale, outputs=outputs)
    found = furthest_module(outputs.sums_of_all_ranks(trainer), total.precision)
    if not sample.forward_is_finite and (found is None or found.output_sqnr_db > -math.inf):
        return "no module's output explains it; `OverflowLocator` finds the operation"
    what = ""
    if found is not None:
        setting = f"`fp32_modules=[{found.module!r}]`"
        works, kept = _effect(sample, sampler.take(total.scale, rules=[found.module]))
        if not works and scale < total.scale:
            works, kept = _effect(sample, sampler.take(scale, rules=[found.module]))
            setting += f" and {_scale_setting(trainer, sample, scale)}" * works
        what, how = str(found._replace(tried=(TriedRemedy(setting, works),))).split("\n")
        if works or found.output_sqnr_db < WRONG_DB:
            return f"{what}\n{how}{kept or '; `find_fp32_modules` searches for several modules'}"
    if found is None or found.module != row.name:  # its own backward may lose the gradient
        works, kept = _effect(sample, sampler.take(total.scale, rules=[row.name]))
        if works:
            return describe_tried([TriedRemedy(f"`fp32_modules=[{row.name!r}]`", True)]) + kept
    return what and f"{what}\n  fix: `find_fp32_modules`, or `fp32_region()` around code outside of modules (not tried)"


def _effect(before: GradientSample, after: GradientSample | None) -> tuple[bool, str]:
    """Return whether a setting helps, and then what it keeps.

    It helps if no gradient is lost, the lost ones have become better, and three bits of all are kept.
    """
    if after is None or math.isnan(after.rows[-1].sqnr_db):
        return False, ""
    total, names = after.rows[-1], {row.name for row in before.bad()}
    worst = min((row for row in after.rows if row.name in names), key=lambda row: row.sqnr_db, default=total)
    is_cured = after.forward_is_finite and not after.bad() and worst.sqnr_db >= LOST_DB and total.keeps_three_bits
    shown = worst if before.rows[-1].keeps_three_bits else total
    what = "the gradient" if shown is total else f"`{shown.name}`"
    return is_cured, f"; {what} then keeps {bits_kept(shown.sqnr_db, shown.precision)}" * is_cured


def settled_scale(trainer: Trainer, now: float) -> float:
    """Return the scale to which the loss scale falls by itself as long as gradients overflow: `now` if it is static.

    It is at least 1: below, the loss is too large.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    lowest = getattr(scaler, "min_scale", 1.0)
    return now if lowest == getattr(scaler, "max_scale", None) else max(1.0, lowest)


def _scale_setting(trainer: Trainer, sample: GradientSample, scale: float) -> str:
    now = sample.rows[-1].scale
    if scale < 1:  # dividing the loss has the same effect, and keeps the loss scale away from its limits
        return f"dividing the loss by {exact(max(now, settled_scale(trainer, now)) / scale)}, and the `eps` of Adam too"
    if scale < now and not sample.fp32_loss_is_finite:
        return f"`scaler={literal(scale)}`, because a loss that is not finite does not lower it"
    if settled_scale(trainer, now) <= scale < now:
        return f"a loss scale of {exact(scale)}, to which it falls by itself"
    return f"`DynamicLossScaler(init_scale={literal(scale)}{f', max_scale={literal(scale)}' * (scale > 2.0**24)})`"
