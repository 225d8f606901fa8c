"""Watch a fit: let some steps settle, time the parts of some steps, and record one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import final, override

from lightning_amp._containers import tensors_in
from lightning_amp.advice._changes import can_fuse
from lightning_amp.advice._loading import loading_of
from lightning_amp.advice._memory import memory
from lightning_amp.advice._record import OptimizerFacts, Recording, Setting, Step
from lightning_amp.advice._recorder import Recorder
from lightning_amp.casting import Choice, MethodOverride, modules_matching, our_name
from lightning_amp.compare import num_rows
from lightning_amp.measure import BACKWARD, CALLBACKS, DATA, FORWARD, OPTIMIZER, SCALING, PartTimer
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import PRIVATE_CALLBACKS, copy_batch

MOST_SETTLING = 40
"""Steps after which the loss scale counts as settled, whether it is or not."""
_SETTLED = 3
"""Number of first steps, which are not timed: they allocate memory, choose kernels and make optimizer states."""
_SETTLING_S = 60.0
"""Seconds after which the loss scale counts as settled, whether it is or not."""
_BATCHES_KEPT = 4
_MOST_RECORDED = 10
"""Number of recorded steps without a backward, after which a step without one is accepted."""
_BETWEEN = "between epochs"
_RESTART = "start of the loader"
_HOOK = "on_before_batch_transfer"
_TIMED = (8, 60)
_TIMED_S = (2.0, 8.0)
"""Lower and upper bounds of the number of timed steps and of their seconds. The longer time also ends the settling."""


@final
class PartsProfiler(Profiler):
    """Pass a timer the part of the step in which Lightning is.

    Callbacks whose names are in `own` are not the user's and do not count as callbacks.
    """

    def __init__(self, timer: PartTimer, own: tuple[str, ...]) -> None:
        super().__init__()
        self._timer, self._own = timer, own
        self._open: list[tuple[str, bool]] = []

    @override
    def start(self, action_name: str) -> None:
        part, detail = self._part(action_name)
        self._open.append((action_name, bool(part)))
        if part:
            self._timer.push(part, detail)

    @override
    def stop(self, action_name: str) -> None:
        if self._open and self._open[-1][0] == action_name and self._open.pop()[1]:
            self._timer.pop()

    def _part(self, action: str) -> tuple[str, str]:
        if action.endswith("train_dataloader_next"):
            return DATA, ""
        if action.startswith("[Strategy]") and action.endswith(".training_step"):
            return FORWARD, ""
        if action.startswith("[LightningModule]") and "optimizer_step" in action.rpartition(".")[2]:
            return SCALING, ""
        if action.startswith("[Callback]"):
            name = action.removeprefix("[Callback]").rpartition(".")[0].partition("{")[0].rpartition(".")[2]
            return ("", "") if name in self._own else (CALLBACKS, name)
        return "", ""


@final
class Watch(Callback):
    """Let a fit settle, time some steps, record one step, and end the fit.

    Args:
        boundary: The file that runs the fit. Frames outside of it are not the user's.
        timed: Whether steps are timed.

    Attributes:
        batches: Copies of some batches, as the loader gave them.
        choice: The precision of our plugin; `None` for another plugin.
        step: The record of the step, without the fields that only other fits can fill; `None` before a step was
            recorded.

    """

    def __init__(self, device: torch.device, boundary: str, *, timed: bool = True) -> None:
        self._where, self._boundary, self._timed = device, boundary, timed
        self._timer = PartTimer(device)
        self._phase: Literal["settling", "timed", "recorded", "done"] = "settling"
        self._num_batches = 0
        self._began_s = 0.0
        self._num_recorded = 0
        self._between_epochs = False
        self._still_settling = False
        self._skipped_at_start = 0
        self._batch_size = 0
        self._seconds: Mapping[str, float] = {}
        self._details: Mapping[str, float] = {}
        self._installed = ExitStack()
        self._recorder: Recorder | None = None
        self.batches: list[Any] = []
        self.loader: Any = None
        self.num_timed = 0
        self.choice: Choice | None = None
        self.step: Step | None = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        profiler = PartsProfiler(self._timer, (type(self).__name__, *PRIVATE_CALLBACKS))
        trainer.profiler = profiler  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        owner: Any = data if data is not None and is_overridden(_HOOK, data) else pl_module
        kept = _KeptBatches(owner, trainer, self.batches)
        kept.install()
        self._installed.callback(kept.restore)
        plugin = trainer.precision_plugin
        self._skipped_at_start = plugin.num_skipped if isinstance(plugin, AmpPrecision) else 0
        for optimizer in trainer.optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: self._timer.push(OPTIMIZER))
            after = optimizer.register_step_post_hook(lambda *_: self._timer.pop())
            self._installed.callback(before.remove)
            self._installed.callback(after.remove)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._timer.push(BACKWARD)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pop()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._between_epochs = True
        self._timer.push(_BETWEEN)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._between_epochs:  # the loader starts after this hook
            self._timer.pop()
            self._timer.push(DATA, _RESTART)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.push(_BETWEEN)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pop()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._between_epochs:
            self._between_epochs = False
            self._timer.pop()
        self._batch_size = self._batch_size or num_rows(batch) or 0
        self._began_s = self._began_s or time.perf_counter()
        if self._phase == "recorded" and _ends_a_step(trainer, pl_module, batch_idx):
            kept = _fp32_modules(trainer, pl_module)
            states = [t for optimizer in trainer.optimizers for _, t in tensors_in(list(optimizer.state.values()))]
            held = [*states, *(t for _, t in tensors_in(batch))]
            recorder = Recorder(pl_module, self._where, kept, held, lambda: self._timer.part, self._boundary)
            self._recorder = self._installed.enter_context(recorder)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._recorder is not None:
            recorded = self._recorder.close()
            if self._num_recorded < _MOST_RECORDED and not any(o.part == BACKWARD for o in recorded.operations):
                self._num_recorded += 1  # a step without a loss
                self._recorder = None
            else:
                self._phase = "done"
        elif self._phase == "settling":
            self._settle(trainer)
        elif self._phase == "timed":
            self.num_timed += 1
            elapsed = time.perf_counter() - self._began_s
            enough = (self.num_timed >= _TIMED[0] and elapsed >= _TIMED_S[0]) or elapsed >= _TIMED_S[1]
            if enough or self.num_timed >= _TIMED[1]:
                self._seconds, self._details = self._timer.stop()
                self._phase = "recorded"
        trainer.should_stop = self._phase == "done"  # even if the module sets another one

    def _settle(self, trainer: Trainer) -> None:
        """Begin to time, or to record, if this step was the last one of the settling phase."""
        elapsed = time.perf_counter() - self._began_s
        if self._num_batches < _SETTLED and elapsed < _TIMED_S[1]:
            return
        self._still_settling = is_settling(trainer)
        if self._still_settling and self._num_batches < MOST_SETTLING and elapsed < _SETTLING_S:
            return
        self._phase = "recorded"
        if self._timed:
            self._phase = "timed"
            self._began_s = time.perf_counter()
            self._timer.start()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loader = trainer.train_dataloader
        if self._recorder is not None:
            self.step = self._record(self._recorder.close(), trainer, pl_module)
        self._installed.close()

    def _record(self, recorded: Recording, trainer: Trainer, module: LightningModule) -> Step:
        """Return the measurements of this fit, while its optimizers and its loader still exist."""
        parts = {part: seconds / self.num_timed for part, seconds in self._seconds.items() if part != _BETWEEN}
        details = {name: seconds / self.num_timed for name, seconds in self._details.items()}
        restart_s, wait_s = details.pop(_RESTART, 0.0), parts.get(DATA, 0.0)
        notes: list[str] = []
        is_slow = wait_s > 0.1 * sum(parts.values())
        loading = loading_of(self.loader, wait_s, restart_s, notes, is_slow=is_slow) if self._timed else None
        if self._still_settling:
            notes.append("a settled loss scale: the last step before the timed ones was skipped")
        plugin = trainer.precision_plugin
        ours = plugin if isinstance(plugin, AmpPrecision) else None
        if ours is not None and ours.last_step is not None and ours.last_step.precision:
            self.choice = Choice.of(ours.last_step.precision)
        return Step(
            precision=self.choice.name if self.choice else our_name(plugin.precision),
            batch_size=self._batch_size,
            num_parameters=sum(p.numel() for p in module.parameters()),
            parts=parts,
            num_timed=self.num_timed,
            callbacks=details,
            recorded=recorded,
            memory=memory(recorded, module, trainer.optimizers),
            optimizers=tuple(map(_facts_of, trainer.optimizers)),
            loading=loading,
            settings=tuple(_slow_settings()),
            skipped=0 if ours is None else ours.num_skipped - self._skipped_at_start,
            notes=tuple(notes),
        )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._installed.close()


@final
class _KeptBatches(MethodOverride):
    """Keep copies of some training batches, before hooks of the user change them and they go to the device."""

    def __init__(self, owner: Any, trainer: Trainer, batches: list[Any]) -> None:
        super().__init__(owner, _HOOK)
        self._trainer, self._batches = trainer, batches

    @override
    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        if self._trainer.training and len(self._batches) < _BATCHES_KEPT:
            self._batches.append(copy_batch(batch))
        return self.inner(batch, dataloader_idx)


def is_settling(trainer: Trainer) -> bool:
    """Return whether the last step was skipped because a dynamic loss scale is still falling.

    It waits for the device.
    """
    plugin = trainer.precision_plugin
    return isinstance(plugin, AmpPrecision) and plugin.last_step is not None and plugin.last_step.skipped


def _facts_of(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    num_parameters = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return OptimizerFacts(type(optimizer).__name__, can_fuse(optimizer), num_parameters)


def _ends_a_step(trainer: Trainer, module: LightningModule, batch_idx: int) -> bool:
    if not module.automatic_optimization:
        return True
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def _fp32_modules(trainer: Trainer, module: LightningModule) -> list[torch.nn.Module]:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision):
        return []
    found = modules_matching(module, plugin.fp32_modules)
    return [inner for matched in found.values() for inner in matched.modules()]


def _slow_settings() -> Iterator[Setting]:
    if torch.is_anomaly_enabled():
        yield "anomaly detection"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms"
