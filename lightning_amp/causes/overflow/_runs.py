"""A failed step, run again: as it was, in fp32, or with something that may help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.casting import Fp32Modules
from lightning_amp.numerics import HALF_DTYPES, all_finite, nonfinite_gradients
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import BOUNDARY, Failure, KeptBatch, TrainingPass
from lightning_amp.tracing import Diagnosis, Edit, GradientPlace, OperationWatch, Place, Trace, diagnose, magnitudes


@final
class StepAsItWas(NamedTuple):
    """What a step showed that was run as the real one.

    Attributes:
        found: Its diagnosis.
        watch: Its operations.
        half_places: Where it computed gradients in half precision.
        parameters: Those whose gradients are not finite.
        unseen: Modules that could not be looked into.

    """

    found: Diagnosis
    watch: OperationWatch
    half_places: set[GradientPlace]
    parameters: tuple[str, ...]
    unseen: list[str]


def run_as_it_was(replay: TrainingPass, step: KeptBatch, scale: float) -> StepAsItWas:
    """Run a step with the same weights, batch, random numbers and scale."""
    trace, watch = Trace(replay.module), OperationWatch(replay.module, BOUNDARY)
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
    return StepAsItWas(found, watch, trace.half_places, parameters, trace.unseen)


@final
class StepInFp32(NamedTuple):
    """What a step was in fp32.

    Attributes:
        found: Its diagnosis; an intended mask is no cause there.
        watch: Its operations.
        largest: The largest of the true gradients that fp16 would have to hold.

    """

    found: Diagnosis
    watch: OperationWatch
    largest: float | None


def run_in_fp32(
    trainer: Trainer, module: LightningModule, replay: TrainingPass, step: KeptBatch, as_it_was: StepAsItWas
) -> StepInFp32 | Failure:
    """Run a step in fp32, casts to half by its own hand left out. Never raises.

    Args:
        trainer: The trainer.
        module: What it trains.
        replay: What the step ran in as it was; used again where no weight is in half precision.
        step: Which.
        as_it_was: The operations of it that were not finite are measured.

    """
    try:
        return _run_in_fp32(trainer, module, replay, step, as_it_was)
    except Exception as error:
        return Failure.of(error, "the training step", "the replay in fp32")


def _run_in_fp32(
    trainer: Trainer, module: LightningModule, replay: TrainingPass, step: KeptBatch, as_it_was: StepAsItWas
) -> StepInFp32:
    exact, half = replay, as_it_was.watch
    if any(parameter.dtype in HALF_DTYPES for parameter in module.parameters()):
        exact = TrainingPass(trainer, module, upcast=True)
    wanted = [call.key for call in half.bad]
    if half.first_backward is not None:
        wanted.append(half.first_backward.call.key)
    trace, watch = Trace(exact.module), OperationWatch(exact.module, BOUNDARY, wanted)
    try:
        loss = exact.run(
            step.batch, step.batch_idx, context=None, random_state=step.random_state, trace=trace, watch=watch
        )
        found = diagnose(trace, loss, step.batch)
        if found.cause == "none" and nonfinite_gradients(_modules.plain_parameters(exact.module)):
            found = Diagnosis("backward", where="parameter")
        sizes = magnitudes(trace.gradients_in_half(as_it_was.half_places))
        largest = max(sizes, key=lambda size: (math.isnan(size), size), default=None)
        return StepInFp32(found, watch, largest)
    finally:
        exact.forget_gradients()
        if exact is not replay:
            exact.close()


@final
@dataclass(frozen=True, slots=True)
class Rerun:
    """Runs a failed step again, with something that may help.

    Attributes:
        plugin: The precision plugin of the run.
        device_type: Of the run.
        replay: What to run it in.
        step: Which.
        scale: What the loss is multiplied with; where the scale is no remedy, one at which it overflows least.
        hidden_in: The operations in fp32, where the fault is a value that loss and gradients need not show: nothing
            else may be infinite or NaN then.

    """

    plugin: Precision
    device_type: str
    replay: TrainingPass
    step: KeptBatch
    scale: float
    hidden_in: OperationWatch | None = None

    def is_finite(
        self,
        *,
        precision: str = "",
        rules: Sequence[str] = (),
        edits: Mapping[tuple[str, Place | None], Edit] | None = None,
        scale: float | None = None,
    ) -> bool:
        """Return whether loss and gradients are finite. Never raises.

        Args:
            precision: To run it in; empty: as it was.
            rules: Modules that compute in fp32.
            edits: Operations, by name and line, that are done in another way.
            scale: What the loss is multiplied with.

        """
        replay, active = self.replay, None
        try:
            context = replay.forward_context()
            if precision and isinstance(self.plugin, AmpPrecision):
                context = self.plugin.forward_context_of(precision)
            if rules:
                active = Fp32Modules(replay.module, rules, self.device_type, active=True)
            looks = edits or self.hidden_in is not None
            only_edits = self.hidden_in is None
            watch = OperationWatch(replay.module, BOUNDARY, edits=edits or {}, only_edits=only_edits) if looks else None
            loss = replay.run(
                self.step.batch,
                self.step.batch_idx,
                context=context,
                random_state=self.step.random_state,
                scale=self.scale if scale is None else scale,
                watch=watch,
            )
            if watch is not None and self.hidden_in is not None:
                there = {call.key for call in self.hidden_in.bad}
                if any(call.makes_nan and call.key not in there for call in watch.bad):
                    return False
            is_finite = loss is None or bool(all_finite([loss]))
            return is_finite and not nonfinite_gradients(_modules.plain_parameters(replay.module))
        except Exception:  # what is tried may be impossible here: it does not work
            return False
        finally:
            replay.forget_gradients()
            if active is not None:
                active.remove()
