"""A few training steps of the user's own module and batches, watched; then the same with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from typing_extensions import final

from lightning_amp.advice import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    IN_FP32,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
    Loading,
    Machine,
    Memory,
    OptimizerFacts,
    Step,
    Variant,
)
from lightning_amp.casting import Choice, our_name
from lightning_amp.comparison import ArmSpec
from lightning_amp.measure import FORWARD, OPTIMIZER
from lightning_amp.precision import AmpPrecision
from lightning_amp.profiling import _analysis, _memory
from lightning_amp.profiling._loading import loading_of
from lightning_amp.profiling._operations import Operation
from lightning_amp.profiling._recorder import Recorder
from lightning_amp.profiling._variants import (
    Batches,
    Contestant,
    fuse_optimizers,
    has_convolutions,
    joined,
    race,
    to_channels_last,
)
from lightning_amp.profiling._watch import Watch
from lightning_amp.shadow import own_data, own_module, private_trainer, run_private_fit
from lightning_amp.tracing import RandomState, paired_random

_INEFFICIENT = 3.0
"""How many times as long as at best a product may take in which its FLOPs still matter."""


@final
class _Seen(NamedTuple):
    """What can be told of a fit only while its Trainer is there."""

    memory: Memory
    optimizers: tuple[OptimizerFacts, ...]
    loading: Loading | None
    choice: Choice | None
    detects_anomalies: bool


@final
class StepExamination:
    """One examination.

    Args:
        make_module: As of :func:`doctor`.
        make_data: Likewise; `None` if the module has loaders of its own.
        arm: How to make the plugin.
        machine: What the machine can do.
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
        self._say = say
        self._make_module, self._make_data, self._arm = make_module, make_data, arm
        self._machine, self._where, self._kwargs = machine, device, trainer_kwargs
        self._notes: list[str] = []
        self._start = RandomState.capture(device.type)

    def run(self) -> Step:
        """Run it.

        Raises:
            Exception: What the user's own code raises in its first fit.

        """
        with ExitStack() as stack:
            data = stack.enter_context(own_data(self._make_data)) if self._make_data is not None else None
            module = self._own()
            plugin = self._arm.plugin()
            found: list[_Seen] = []
            watch = Watch(self._where, __file__, lambda *fit: found.extend(self._look(*fit)))
            trainer = private_trainer(self._where, plugin, [watch], self._kwargs)
            trainer.profiler = watch.profiler()  # type: ignore[attr-defined]
            self._say("training some steps")
            try:
                run_private_fit(trainer, module, data)
            except Exception as error:
                if not watch.batches and trainer.num_training_batches == 0:  # a schedule over no steps, for example
                    raise ValueError(_too_short(watch)) from error
                raise
            if watch.recorder is None:
                raise ValueError(_too_short(watch))
            variants, fp32 = self._race(watch, module, plugin, data, found[0])
            return self._step(watch, module, plugin, found[0], variants, fp32)

    # -- the step as it is ---------------------------------------------------------------------------------------------

    def _look(self, watch: Watch, trainer: Trainer, module: LightningModule) -> Iterator[_Seen]:
        if watch.recorder is not None:
            yield _Seen(
                _memory.memory(watch.recorder, trainer, module),
                _memory.optimizer_facts(trainer),
                self._loading(trainer, watch),
                _choice(trainer),
                torch.is_anomaly_enabled(),
            )

    def _loading(self, trainer: Trainer, watch: Watch) -> Loading | None:
        """Measure the loader alone where the step waits for it: with other numbers of workers."""
        number, data_s = max(1, watch.num_timed), watch.parts.get("data", 0.0)
        is_slow = data_s > 0.1 * sum(watch.parts.values())
        loader: Any = trainer.train_dataloader
        return loading_of(loader, data_s / number, watch.restart_s / number, self._notes, is_slow=is_slow)

    # -- with one thing changed ----------------------------------------------------------------------------------------

    def _race(
        self,
        watch: Watch,
        module: LightningModule,
        plugin: Any,
        data: LightningDataModule | None,
        found: _Seen,
    ) -> tuple[tuple[Variant, ...], dict[str, Any]]:
        batches = Batches(watch.batches, watch.loader)
        fp32: dict[str, Any] = {}

        def keep(watch: Watch, trainer: Trainer, module: LightningModule) -> None:
            if watch.recorder is not None:
                fp32.update(memory=_memory.memory(watch.recorder, trainer, module), recorder=watch.recorder)

        in_fp32 = Watch(self._where, __file__, keep, timed=False)
        taking_part = [Contestant(AS_IT_IS, lambda: (module, plugin), batches)]
        if found.choice is None or found.choice.mixed:
            make = lambda: (self._own(), AmpPrecision("fp32"))  # noqa: E731
            taking_part.append(Contestant(IN_FP32, make, batches, in_fp32))
        parts, total = watch.parts, max(sum(watch.parts.values()), 1e-9)
        if any(o.can_fuse for o in found.optimizers) and parts.get(OPTIMIZER, 0.0) / total > 0.03:
            taking_part.append(Contestant(FUSED, lambda: (fuse_optimizers(self._own()), self._arm.plugin()), batches))
        if _has_channels_first(watch.recorder) and has_convolutions(module):
            taking_part.append(
                Contestant(CHANNELS_LAST, lambda: (to_channels_last(self._own()), self._arm.plugin()), batches)
            )
        if getattr(plugin, "fp32_modules", ()) and not isinstance(self._arm.source, AmpPrecision):
            without = replace(self._arm, source={k: v for k, v in self._arm.source.items() if k != "fp32_modules"})
            taking_part.append(Contestant(WITHOUT_RULES, lambda: (self._own(), without.plugin()), batches))
        larger = joined(watch.batches, TIMES_LARGER)
        if larger is not None and watch.batch_size:
            taking_part.append(Contestant(LARGER_BATCH, lambda: (self._own(), self._arm.plugin()), Batches(larger)))
        kwargs = {**self._kwargs, "accumulate_grad_batches": 1} if module.automatic_optimization else self._kwargs
        known_s = sum(s for part, s in parts.items() if part != "data") / max(1, watch.num_timed)
        return race(taking_part, self._where, kwargs, data, known_s=known_s, say=self._say), fp32

    def _own(self) -> LightningModule:
        with paired_random(self._where.type, self._start):  # a factory may draw how deep its network is
            return own_module(self._make_module)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _step(
        self,
        watch: Watch,
        module: LightningModule,
        plugin: Any,
        found: _Seen,
        variants: tuple[Variant, ...],
        fp32: Mapping[str, Any],
    ) -> Step:
        recorder = watch.recorder
        assert recorder is not None
        operations = _of_the_module(recorder.operations)
        choice = found.choice
        name = choice.name if choice else our_name(plugin.precision)
        alignment = 16 if name == "fp8" else 8
        number = max(1, watch.num_timed)
        convolutions = [o for o in operations if o.is_convolution]
        conv_flops = sum(o.flops for o in convolutions)
        last_flops = sum(o.flops for o in convolutions if o.channels_last)
        return Step(
            precision=name,
            plugin=self._arm.description,
            batch_size=watch.batch_size,
            num_parameters=sum(p.numel() for p in module.parameters()),
            parts={part: seconds / number for part, seconds in watch.parts.items()},
            num_timed=watch.num_timed,
            callbacks={callback: seconds / number for callback, seconds in watch.callbacks.items()},
            loading=found.loading,
            flops=_analysis.flops_by_dtype(operations),
            module_flops=_analysis.flops_by_module(operations),
            product_s=_analysis.product_s(operations),
            fp32_product_share=self._product_share(fp32, variants),
            slower=_analysis.slower_products(operations, _of_the_module(fp32["recorder"].operations)) if fp32 else (),
            recorded_s=sum(o.seconds for o in recorder.operations),
            reasons=_analysis.reasons(operations) if choice is None or choice.mixed else (),
            unaligned=self._unaligned(operations, alignment),
            alignment=alignment,
            casts=_analysis.casts(operations),
            waits=_analysis.waits(recorder),
            variants=variants,
            memory=found.memory,
            fp32_memory=self._fp32_memory(found.memory, fp32.get("memory")),
            logits=_memory.largest_loss(recorder),
            optimizers=found.optimizers,
            convolutions=conv_flops,
            channels_last=bool(conv_flops) and last_flops >= 0.5 * conv_flops,
            settings=_settings(found),
            fp32_modules=tuple(map(_rule_name, getattr(plugin, "fp32_modules", ()))),
            skipped=watch.num_skipped,
            notes=(*self._notes, *_unsettled(watch), *(f"{v.label}: {v.error}" for v in variants if v.error)),
        )

    def _fp32_memory(self, own: Memory, full: Memory | None) -> Memory | None:
        """Compare optimizer states at equal history: LBFGS keeps more with each step, and the fp32 run is shorter.

        Optimizer states have the format of the parameters, which is the same in both runs.
        """
        if full is None or full.states == own.states:
            return full
        self._notes.append(
            "optimizer states of the fp32 run, which had fewer steps: counted as large as those of this run"
        )
        return replace(full, states=own.states, peak=full.peak - full.states + own.states)

    def _product_share(self, fp32: Mapping[str, Any], variants: Sequence[Variant]) -> float:
        """Return which share of a step in fp32 the matrix products are, which half precision could make faster.

        Small products take the time of a call and not that of their FLOPs: more than some times what the device needs
        for these is not counted.
        """
        recorder = fp32.get("recorder")
        timed = next((v.step_s for v in variants if v.label == IN_FP32 and v.step_s), None)
        full = self._machine.format("fp32")
        if recorder is None or timed is None or full is None or not full.tflops:
            return 0.0
        operations = _of_the_module(recorder.operations)
        seconds = _analysis.product_s(operations)
        at_best_s = sum(_analysis.flops_by_dtype(operations).values()) / full.tflops / 1e12
        whole = max(median(timed), sum(operation.seconds for operation in recorder.operations))  # it was busy, perhaps
        return min(1.0, min(seconds, _INEFFICIENT * at_best_s) / whole)

    def _unaligned(self, operations: Sequence[Any], alignment: int) -> Any:
        try:
            return _analysis.unaligned(operations, alignment, self._where)
        except Exception as error:
            self._notes.append(f"padding was not measured: {type(error).__name__}: {error}")
            return ()


def _of_the_module(operations: Sequence[Operation]) -> list[Operation]:
    """Leave out what optimizers compute: some multiply matrices, whatever the precision."""
    return [operation for operation in operations if operation.part != OPTIMIZER]


def _has_channels_first(recorder: Recorder | None) -> bool:
    """Return whether convolutions in another layout than channels_last are a tenth of the products."""
    operations = [] if recorder is None else recorder.operations
    products = [o for o in operations if o.flops and o.part == FORWARD]
    own = [o for o in products if o.is_convolution and not o.channels_last]
    return sum(o.flops for o in own) > 0.1 * sum(o.flops for o in products)


def _choice(trainer: Trainer) -> Choice | None:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision):
        return None
    record = plugin.last_step
    return Choice.of(record.precision) if record is not None and record.precision else None


def _settings(found: _Seen) -> tuple[str, ...]:
    on = {
        "anomaly detection": found.detects_anomalies,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    return tuple(name for name, is_on in on.items() if is_on)


def _rule_name(rule: Any) -> str:
    return rule if isinstance(rule, str) else rule.__name__


def _unsettled(watch: Watch) -> tuple[str, ...]:
    return ("a settled loss scale: the last step before the timed ones was skipped",) if watch.still_settling else ()


def _too_short(watch: Watch) -> str:
    if not watch.batches:
        return "The training loader gave no batch. Check its dataset, `limit_train_batches` and `drop_last`."
    return f"Training ended after {watch.num_timed} timed steps, before one could be recorded; it stopped by itself."
