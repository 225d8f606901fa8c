"""A few training steps of the user's own module and batches, watched; then the same with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp.advice._changes import fuse_optimizers, has_convolutions, joined, to_channels_last
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
from lightning_amp.advice._watch import Watch, Watched
from lightning_amp.advice.findings import unaligned
from lightning_amp.casting import our_name
from lightning_amp.compare import ArmSpec
from lightning_amp.measure import DATA, FORWARD, OPTIMIZER
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import own_data, own_module, private_trainer, run_private_fit
from lightning_amp.tracing import RandomState, paired_random

_INEFFICIENT = 3.0
"""How many times as long as at best a product may take in which its FLOPs still matter."""


@final
class StepExamination:
    """One examination: :meth:`run` watches a fit, races variants of its step, and returns the record.

    Args:
        make_module: As of :func:`doctor`.
        make_data: Likewise; `None` if the module has loaders of its own.
        arm: How to make the plugin.
        machine: What the machine can do.
        device: Where the fits run.
        trainer_kwargs: The user's.
        say: Gets the progress.

    """

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        make_data: Callable[[], LightningDataModule] | None,
        arm: ArmSpec,
        machine: Machine,
        device: torch.device,
        trainer_kwargs: Mapping[str, Any],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._make_module, self._make_data, self._arm = make_module, make_data, arm
        self._machine, self._where, self._kwargs, self._say = machine, device, trainer_kwargs, say
        self._start = RandomState.capture(device.type)

    def run(self) -> Step:
        """Run it.

        Raises:
            Exception: What the user's own code raises in its first fit.

        """
        with ExitStack() as stack:
            data = stack.enter_context(own_data(self._make_data)) if self._make_data is not None else None
            module, plugin = self._own(), self._arm.plugin()
            seen = self._watched_fit(module, plugin, data)
            contestants = list(self._contestants(seen, module, plugin))
            kwargs = {**self._kwargs, "accumulate_grad_batches": 1} if module.automatic_optimization else self._kwargs
            known_s = sum(seconds for part, seconds in seen.parts.items() if part != DATA)
            variants = race(contestants, Track(self._where, kwargs, data), known_s=known_s, say=self._say)
            fp32 = next((contestant.watched for contestant in contestants if contestant.label == IN_FP32), None)
            return self._record(module, plugin, seen, fp32, variants)

    def _own(self) -> LightningModule:
        with paired_random(self._where.type, self._start):  # a factory may draw how deep its network is
            return own_module(self._make_module)

    def _watched_fit(self, module: LightningModule, plugin: Any, data: LightningDataModule | None) -> Watched:
        """Train for some steps, and return what was seen."""
        watch = Watch(self._where, __file__)
        trainer = private_trainer(self._where, plugin, [watch], self._kwargs)
        trainer.profiler = watch.profiler()  # type: ignore[attr-defined]
        self._say("training some steps")
        try:
            run_private_fit(trainer, module, data)
        except Exception as error:
            if not watch.batches and trainer.num_training_batches == 0:  # a schedule over no steps, for example
                raise ValueError(_too_short(watch)) from error
            raise
        if watch.watched is None:
            raise ValueError(_too_short(watch))
        return watch.watched

    def _contestants(self, seen: Watched, module: LightningModule, plugin: Any) -> Iterator[Contestant]:
        """Yield the step as it is, in fp32, and with each change that may help."""
        batches, arm = Batches(seen.batches, seen.loader), self._arm
        yield Contestant(AS_IT_IS, lambda: (module, plugin), batches)
        if seen.choice is None or seen.choice.mixed:
            yield Contestant(IN_FP32, lambda: (self._own(), AmpPrecision("fp32")), batches, is_watched=True)
        share = seen.parts.get(OPTIMIZER, 0.0) / max(sum(seen.parts.values()), 1e-9)
        if any(optimizer.can_fuse for optimizer in seen.optimizers) and share > 0.03:
            yield Contestant(FUSED, lambda: (fuse_optimizers(self._own()), arm.plugin()), batches)
        if _has_channels_first(seen.recorded) and has_convolutions(module):
            yield Contestant(CHANNELS_LAST, lambda: (to_channels_last(self._own()), arm.plugin()), batches)
        if getattr(plugin, "fp32_modules", ()) and not isinstance(arm.source, AmpPrecision):
            without = replace(arm, source={k: v for k, v in arm.source.items() if k != "fp32_modules"})
            yield Contestant(WITHOUT_RULES, lambda: (self._own(), without.plugin()), batches)
        larger = joined(seen.batches, TIMES_LARGER)
        if larger is not None and seen.batch_size:
            yield Contestant(LARGER_BATCH, lambda: (self._own(), arm.plugin()), Batches(larger))

    def _record(
        self,
        module: LightningModule,
        plugin: Any,
        seen: Watched,
        fp32: Watched | None,
        variants: tuple[Variant, ...],
    ) -> Step:
        notes = list(seen.notes)
        precision = seen.choice.name if seen.choice else our_name(plugin.precision)
        alignment = 16 if precision == "fp8" else 8
        return Step(
            precision=precision,
            plugin=self._arm.description,
            batch_size=seen.batch_size,
            num_parameters=sum(p.numel() for p in module.parameters()),
            parts=seen.parts,
            num_timed=seen.num_timed,
            callbacks=seen.callbacks,
            recorded=seen.recorded,
            fp32_recorded=fp32.recorded if fp32 else None,
            fp32_product_share=_product_share(fp32.recorded, variants, self._machine) if fp32 else 0.0,
            memory=seen.memory,
            fp32_memory=_at_equal_history(seen.memory, fp32.memory, notes) if fp32 else None,
            optimizers=seen.optimizers,
            loading=seen.loading,
            unaligned=self._unaligned(seen.recorded, alignment, notes),
            alignment=alignment,
            variants=variants,
            settings=seen.settings,
            skipped=seen.num_skipped,
            notes=(*notes, *(f"{v.label}: {v.error}" for v in variants if v.error)),
        )

    def _unaligned(self, recorded: Recording, alignment: int, notes: list[str]) -> tuple[Unaligned, ...]:
        try:
            return unaligned(recorded, alignment, partial(time_padded, self._where))
        except Exception as error:
            notes.append(f"padding was not measured: {type(error).__name__}: {error}")
            return ()


def _at_equal_history(own: Memory, full: Memory, notes: list[str]) -> Memory:
    """Compare optimizer states at equal history: LBFGS keeps more with each step, and the fp32 run is shorter.

    Optimizer states have the format of the parameters, which is the same in both runs.
    """
    if full.states == own.states:
        return full
    notes.append("optimizer states of the fp32 run, which had fewer steps: counted as large as those of this run")
    return replace(full, states=own.states, peak=full.peak - full.states + own.states)


def _product_share(recorded: Recording, variants: Sequence[Variant], machine: Machine) -> float:
    """Return which share of a step in fp32 the matrix products are, which half precision could make faster.

    A small product takes as long as its call, not as its FLOPs. So the time that counts for it is limited to a few
    times what the device needs for its FLOPs.
    """
    timed = next((v.step_s for v in variants if v.label == IN_FP32 and v.step_s), None)
    full = machine.format("fp32")
    if timed is None or full is None or not full.tflops:
        return 0.0
    at_best_s = sum(recorded.flops.values()) / full.tflops / 1e12
    whole = max(median(timed), recorded.seconds)  # it was busy, perhaps
    return min(1.0, min(recorded.product_s, _INEFFICIENT * at_best_s) / whole)


def _has_channels_first(recorded: Recording) -> bool:
    """Return whether convolutions in another layout than channels_last are a tenth of the products of the forward."""
    own = [o for o in recorded.operations if o.part == FORWARD and o.is_convolution and not o.channels_last]
    return sum(o.flops for o in own) > 0.1 * recorded.forward_flops


def _too_short(watch: Watch) -> str:
    if not watch.batches:
        return "The training loader gave no batch. Check its dataset, `limit_train_batches` and `drop_last`."
    return f"Training ended after {watch.num_timed} timed steps, before one could be recorded; it stopped by itself."
