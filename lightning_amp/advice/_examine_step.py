"""Watch a few training steps of the user's module on its own batches, then time the step with one setting changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp.advice._changes import fuse_optimizers, has_convolutions, joined
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._probes import time_padded
from lightning_amp.advice._race import Batches, Contestant, Track, race
from lightning_amp.advice._record import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    IN_FP32,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
    Memory,
    Recording,
    Step,
    Unaligned,
    Variant,
)
from lightning_amp.advice._watch import Watch
from lightning_amp.advice.findings import unaligned
from lightning_amp.compare import Spec
from lightning_amp.measure import DATA, FORWARD, OPTIMIZER
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import own_data, own_module, private_trainer, run_private_fit
from lightning_amp.tracing import RandomState, paired_random

_INEFFICIENT = 3.0
"""The time of a small product is capped at this multiple of the seconds that the device needs for its FLOPs."""


def examine_step(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule] | None,
    arm: Spec,
    machine: Machine,
    device: torch.device,
    trainer_kwargs: Mapping[str, Any],
    say: Callable[[str], None],
) -> Step:
    """Watch a fit, time variants of its step, and return the record; `say` is called with the progress."""
    start = RandomState.capture(device.type)

    def own() -> LightningModule:
        with paired_random(device.type, start):  # a factory may choose the depth of its network at random
            return own_module(make_module)

    with ExitStack() as stack:
        data = stack.enter_context(own_data(make_data)) if make_data is not None else None
        module, plugin, watch = own(), arm.plugin(), Watch(device, __file__)
        say("training some steps")
        step = _watched_fit(watch, private_trainer(device, plugin, [watch], trainer_kwargs), module, data)
        contestants = list(_contestants(step, watch, module, plugin, arm, own))
        kwargs = {**trainer_kwargs, "accumulate_grad_batches": 1} if module.automatic_optimization else trainer_kwargs
        known_s = sum(seconds for part, seconds in step.parts.items() if part != DATA)
        variants = race(contestants, Track(device, kwargs, data), known_s=known_s, say=say)
    fp32 = next((contestant.record for contestant in contestants if contestant.label == IN_FP32), None)
    notes = list(step.notes)
    alignment = 16 if step.precision == "fp8" else 8
    return replace(
        step,
        plugin=arm.description,
        fp32_recorded=fp32.recorded if fp32 else None,
        fp32_product_share=_product_share(fp32.recorded, variants, machine) if fp32 else 0.0,
        fp32_memory=_at_equal_history(step.memory, fp32.memory, notes) if fp32 else None,
        unaligned=_unaligned(step.recorded, alignment, device, notes),
        alignment=alignment,
        variants=variants,
        notes=(*notes, *(f"{v.label}: {v.error}" for v in variants if v.error)),
    )


def _watched_fit(watch: Watch, trainer: Any, module: LightningModule, data: LightningDataModule | None) -> Step:
    """Train for some steps, and return their record.

    Raises:
        ValueError: If there were too few batches.

    """
    no_batch = "The training loader gave no batch. Check its dataset, `limit_train_batches` and `drop_last`."
    try:
        run_private_fit(trainer, module, data)
    except Exception as error:
        if not watch.batches and trainer.num_training_batches == 0:  # such as a schedule over zero steps
            raise ValueError(no_batch) from error
        raise
    if watch.step is None:
        steps = (
            f"Training ended after {watch.num_timed} timed steps, before one could be recorded; it stopped by itself."
        )
        raise ValueError(steps if watch.batches else no_batch)
    return watch.step


def _contestants(
    step: Step, watch: Watch, module: LightningModule, plugin: Any, arm: Spec, own: Callable[[], LightningModule]
) -> Iterator[Contestant]:
    """Yield the unchanged step, the step in fp32, and the step with each change that may help."""
    batches = Batches(watch.batches, watch.loader)
    yield Contestant(AS_IT_IS, lambda: (module, plugin), batches)
    if watch.choice is None or watch.choice.mixed:
        yield Contestant(IN_FP32, lambda: (own(), AmpPrecision("fp32")), batches, is_watched=True)
    if any(optimizer.can_fuse for optimizer in step.optimizers) and step.share(OPTIMIZER) > 0.03:
        yield Contestant(FUSED, lambda: (fuse_optimizers(own()), arm.plugin()), batches)
    if _has_channels_first(step.recorded) and has_convolutions(module):
        layout: Any = {"memory_format": torch.channels_last}
        yield Contestant(CHANNELS_LAST, lambda: (own().to(**layout), arm.plugin()), batches)
    if getattr(plugin, "fp32_modules", ()) and not isinstance(arm.source, AmpPrecision):
        without = replace(arm, source={k: v for k, v in arm.source.items() if k != "fp32_modules"})
        yield Contestant(WITHOUT_RULES, lambda: (own(), without.plugin()), batches)
    larger = joined(watch.batches, TIMES_LARGER)
    if larger is not None and step.batch_size:
        yield Contestant(LARGER_BATCH, lambda: (own(), arm.plugin()), Batches(larger))


def _unaligned(recorded: Recording, alignment: int, device: torch.device, notes: list[str]) -> tuple[Unaligned, ...]:
    try:
        return unaligned(recorded, alignment, partial(time_padded, device))
    except Exception as error:
        notes.append(f"padding was not measured: {type(error).__name__}: {error}")
        return ()


def _at_equal_history(own: Memory, full: Memory, notes: list[str]) -> Memory:
    """Return the memory in fp32, with the optimizer states taken from the unchanged step.

    LBFGS keeps more states with each step, and the fp32 run has fewer steps. Optimizer states have the format of the
    parameters, which is the same in both runs.
    """
    if full.states == own.states:
        return full
    notes.append("optimizer states of the fp32 run, which had fewer steps: counted as large as in this run")
    return replace(full, states=own.states, peak=full.peak - full.states + own.states)


def _product_share(recorded: Recording, variants: Sequence[Variant], machine: Machine) -> float:
    """Return the share of a step in fp32 that half precision could make faster: its matrix products.

    A small product takes the time of a call, however few FLOPs it has. So the time that counts is limited to a few
    times the seconds that the device needs for the FLOPs.
    """
    timed = next((v.step_s for v in variants if v.label == IN_FP32 and v.step_s), None)
    full = machine.format("fp32")
    if timed is None or full is None or not full.tflops:
        return 0.0
    at_best_s = sum(recorded.flops.values()) / full.tflops / 1e12
    whole = max(median(timed), recorded.seconds)  # the recorded step may be slower, on a busy machine
    return min(1.0, min(recorded.product_s, _INEFFICIENT * at_best_s) / whole)


def _has_channels_first(recorded: Recording) -> bool:
    """Return whether convolutions in another layout than channels_last have a tenth of the FLOPs of the forward."""
    own = [o for o in recorded.operations if o.part == FORWARD and o.is_convolution and not o.channels_last]
    return sum(o.flops for o in own) > 0.1 * recorded.forward_flops
