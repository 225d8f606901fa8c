"""A failed step, run again in fp32, or with something that may help."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import Fp32Modules
from lightning_amp.numerics import HALF_DTYPES, all_finite, nonfinite_gradients
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import _training_pass
from lightning_amp.shadow._batch_window import KeptBatch
from lightning_amp.shadow._remedies import Trial
from lightning_amp.shadow._training_pass import TrainingPass
from lightning_amp.tracing import Diagnosis, GradientPlace, OperationWatch, Trace, diagnose, magnitudes

BOUNDARY = _training_pass.__file__
"""What calls the step: no line above it is the step's."""


@final
class StepInFp32(NamedTuple):
    """What a step was in fp32.

    Attributes:
        found: Its diagnosis.
        watch: Its operations.
        largest: The largest of the true gradients that fp16 would have to hold.

    """

    found: Diagnosis
    watch: OperationWatch
    largest: float | None


def run_in_fp32(
    trainer: Trainer,
    module: LightningModule,
    replay: TrainingPass,
    step: KeptBatch,
    half: OperationWatch,
    half_places: set[GradientPlace],
) -> StepInFp32:
    """Run a step in fp32, casts to half by its own hand left out.

    Args:
        trainer: The trainer.
        module: What it trains.
        replay: What the step ran in as it was; used again where no weight is in half precision.
        step: Which.
        half: The operations of the step as it was: those that were not finite are measured.
        half_places: Where it computed gradients in half precision.

    """
    exact = replay
    if any(parameter.dtype in HALF_DTYPES for parameter in module.parameters()):
        exact = TrainingPass(trainer, module, upcast=True)
    wanted = [call.key for call in half.bad]
    if half.first_backward is not None:
        wanted.append(half.first_backward.call.key)
    watch = OperationWatch(exact.module, BOUNDARY, wanted)
    try:
        with Trace(exact.module) as trace, watch:
            loss = exact.run(
                step.batch,
                step.batch_idx,
                context=None,
                random_state=step.random_state,
                trace=trace,
                watch=watch,
            )
        found = diagnose(trace, loss, step.batch)
        if found.cause == "none" and nonfinite_gradients(_modules.plain_parameters(exact.module)):
            found = Diagnosis("backward", where="parameter")
        sizes = magnitudes(trace.gradients_in_half(half_places))
        largest = max(sizes, key=lambda size: (math.isnan(size), size), default=None)
        return StepInFp32(found, watch, largest)
    finally:
        exact.forget_gradients()
        if exact is not replay:
            exact.close()


def run_trial(
    trainer: Trainer,
    replay: TrainingPass,
    step: KeptBatch,
    trial: Trial,
    scale: float,
    hidden_in: OperationWatch | None = None,
) -> bool:
    """Return whether loss and gradients of a step are finite as a trial has it. Never raises.

    Args:
        trainer: The trainer.
        replay: What to run it in.
        step: Which.
        trial: What is tried.
        scale: What the loss is multiplied with.
        hidden_in: The operations in fp32, where the fault is a value that loss and gradients need not show: nothing
            else may be infinite or NaN then.

    """
    rules: Fp32Modules | None = None
    try:
        plugin = trainer.precision_plugin
        context = replay.forward_context()
        if trial.precision and isinstance(plugin, AmpPrecision):
            context = plugin.forward_context_of(trial.precision)
        if trial.rules:
            rules = Fp32Modules(replay.module, trial.rules, trainer.strategy.root_device.type, active=True)
        looks = trial.edits or hidden_in is not None
        only_edits = hidden_in is None
        watch = OperationWatch(replay.module, BOUNDARY, edits=trial.edits, only_edits=only_edits) if looks else None
        with watch or nullcontext():
            loss = replay.run(
                step.batch,
                step.batch_idx,
                context=context,
                random_state=step.random_state,
                scale=scale,
                watch=watch,
            )
        if watch is not None and hidden_in is not None:
            there = {call.key for call in hidden_in.bad}
            if any(call.makes_nan and call.key not in there for call in watch.bad):
                return False
        is_finite = loss is None or bool(all_finite([loss]))
        return is_finite and not nonfinite_gradients(_modules.plain_parameters(replay.module))
    except Exception:  # what is tried may be impossible here: it does not work
        return False
    finally:
        replay.forget_gradients()
        if rules is not None:
            rules.remove()
