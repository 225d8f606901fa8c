"""The callback and the profiler that watch a fit: some steps to settle, some that are timed, one that is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import final, override

from lightning_amp._containers import tensors_in
from lightning_amp.advice._laps import MOST_SETTLING, is_settling
from lightning_amp.advice._loading import loading_of
from lightning_amp.advice._memory import memory, optimizer_facts
from lightning_amp.advice._record import Loading, Memory, OptimizerFacts, Recording, Setting
from lightning_amp.advice._recorder import Recorder
from lightning_amp.casting import Choice, MethodOverride, modules_matching
from lightning_amp.comparison import num_rows
from lightning_amp.measure import BACKWARD, CALLBACKS, DATA, FORWARD, OPTIMIZER, SCALING, PartTimer
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import PRIVATE_CALLBACKS, copy_batch

_SETTLED = 3
"""Steps in which memory is allocated, kernels are chosen and optimizers make their states."""
_SETTLING_S = 60.0
"""Seconds after which a loss scale is taken as it is, too."""
_BATCHES_KEPT = 4
_MOST_RECORDED = 10
_BETWEEN = "between epochs"
RESTART = "start of the loader"
_HOOK = "on_before_batch_transfer"
_TIMED = (8, 60)
_TIMED_S = (2.0, 8.0)
"""At least and at most: how many steps are timed, and for how long. The longer time ends the settling as well."""


@final
class PartsProfiler(Profiler):
    """Tells the clock what Lightning is doing.

    Args:
        clock: Of the fit.
        own: Names of callbacks that are not the user's.

    """

    def __init__(self, clock: PartTimer, own: tuple[str, ...]) -> None:
        super().__init__()
        self._clock, self._own = clock, own
        self._open: list[tuple[str, bool]] = []

    @override
    def start(self, action_name: str) -> None:
        part, detail = self._part(action_name)
        self._open.append((action_name, bool(part)))
        if part:
            self._clock.push(part, detail)

    @override
    def stop(self, action_name: str) -> None:
        if self._open and self._open[-1][0] == action_name and self._open.pop()[1]:
            self._clock.pop()

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
@dataclass(frozen=True)
class Watched:
    """What was seen of a fit.

    Attributes:
        recorded: One of its steps, operation by operation.
        parts: Mean seconds of a timed step by part.
        num_timed: How many steps were timed.
        callbacks: Mean seconds of a timed step by callback of the user.
        loading: How batches are loaded, with other numbers of workers tried where a step waits for its batch.
        choice: The precision of our plugin; `None` of another plugin.
        num_skipped: Steps that were skipped in all.
        batches: Copies of some batches, as the loader gave them.
        loader: Which did.
        notes: What could not be measured, and why.

    """

    recorded: Recording
    memory: Memory
    optimizers: tuple[OptimizerFacts, ...]
    parts: Mapping[str, float]
    num_timed: int
    callbacks: Mapping[str, float]
    loading: Loading | None
    batch_size: int
    choice: Choice | None
    settings: tuple[Setting, ...]
    num_skipped: int
    batches: Sequence[Any]
    loader: Any
    notes: tuple[str, ...]


@final
class Watch(Callback):
    """Lets a fit settle, times some steps, records one, and ends the fit.

    Args:
        boundary: The file of who runs the fit: nothing outside of it is the user's.
        timed: Whether steps are timed.

    Attributes:
        batches: Copies of some batches, as the loader gave them.
        num_timed: How many steps were timed.
        watched: What was seen; `None` before a step was recorded.

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
        self._handles: list[Any] = []
        self._kept: _KeptBatches | None = None
        self._recorder: Recorder | None = None
        self.batches: list[Any] = []
        self.num_timed = 0
        self.watched: Watched | None = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    def profiler(self) -> PartsProfiler:
        """Return the profiler that belongs to it."""
        return PartsProfiler(self._timer, (type(self).__name__, *PRIVATE_CALLBACKS))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_batches(trainer, pl_module)
        plugin = trainer.precision_plugin
        self._skipped_at_start = plugin.num_skipped if isinstance(plugin, AmpPrecision) else 0
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._timer.push(OPTIMIZER)))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._timer.pop()))

    def _keep_batches(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep some batches as the loader gives them, before hooks change them and they go to the device."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        owner: Any = data if data is not None and is_overridden(_HOOK, data) else module
        self._kept = _KeptBatches(owner, trainer, self.batches)
        self._kept.install()

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
        if self._between_epochs:  # what follows is the start of the loader
            self._timer.pop()
            self._timer.push(DATA, RESTART)

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
            self._recorder = Recorder(pl_module, self._where, kept, held, lambda: self._timer.part, self._boundary)
            self._recorder.__enter__()

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
                self._begin("recorded")
        trainer.should_stop = self._phase == "done"  # whatever the module thinks of it

    def _settle(self, trainer: Trainer) -> None:
        """Begin to time, or to record, if this was the last step that settles."""
        elapsed = time.perf_counter() - self._began_s
        if self._num_batches < _SETTLED and elapsed < _TIMED_S[1]:
            return
        self._still_settling = is_settling(trainer)
        if self._still_settling and self._num_batches < MOST_SETTLING and elapsed < _SETTLING_S:
            return
        self._begin("timed" if self._timed else "recorded")

    def _begin(self, phase: Literal["timed", "recorded"]) -> None:
        self._phase = phase
        if phase == "timed":
            self._began_s = time.perf_counter()
            self._timer.start()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._phase == "timed" and self.num_timed:  # the data ended before
            self._seconds, self._details = self._timer.stop()
        if self._recorder is not None:
            self.watched = self._seen(self._recorder.close(), trainer, pl_module)
        self._take_off()

    def _seen(self, recorded: Recording, trainer: Trainer, module: LightningModule) -> Watched:
        """Return what there is to tell, while the Trainer is still there."""
        number = max(1, self.num_timed)
        parts = {part: seconds / number for part, seconds in self._seconds.items() if part != _BETWEEN}
        details = {name: seconds / number for name, seconds in self._details.items()}
        restart_s = details.pop(RESTART, 0.0)
        notes: list[str] = []
        loader: Any = trainer.train_dataloader
        wait_s = parts.get(DATA, 0.0)
        is_slow = wait_s > 0.1 * sum(parts.values())
        loading = loading_of(loader, wait_s, restart_s, notes, is_slow=is_slow) if self._timed else None
        if self._still_settling:
            notes.append("a settled loss scale: the last step before the timed ones was skipped")
        plugin = trainer.precision_plugin
        ours = plugin if isinstance(plugin, AmpPrecision) else None
        return Watched(
            recorded=recorded,
            memory=memory(recorded, module, trainer.optimizers),
            optimizers=optimizer_facts(trainer.optimizers),
            parts=parts,
            num_timed=self.num_timed,
            callbacks=details,
            loading=loading,
            batch_size=self._batch_size,
            choice=_choice(ours),
            settings=tuple(_slow_settings()),
            num_skipped=0 if ours is None else ours.num_skipped - self._skipped_at_start,
            batches=self.batches,
            loader=loader,
            notes=tuple(notes),
        )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._take_off()

    def _take_off(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if self._kept is not None:
            self._kept.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@final
class _KeptBatches(MethodOverride):
    """The hook through which each batch goes first; some batches of training are kept as they came.

    Args:
        owner: The module, or the data module whose hook runs in its place.
        trainer: Whose fit it is.
        batches: Where copies go.

    """

    def __init__(self, owner: Any, trainer: Trainer, batches: list[Any]) -> None:
        super().__init__(owner, _HOOK)
        self._trainer, self._batches = trainer, batches

    @override
    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        if self._trainer.training and len(self._batches) < _BATCHES_KEPT:
            self._batches.append(copy_batch(batch))
        return self.inner(batch, dataloader_idx)

    @property
    @override
    def replacement(self) -> Callable[..., Any]:
        return self.as_method()


def _ends_a_step(trainer: Trainer, module: LightningModule, batch_idx: int) -> bool:
    if not module.automatic_optimization:
        return True
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def _fp32_modules(trainer: Trainer, module: LightningModule) -> list[torch.nn.Module]:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision):
        return []
    found = modules_matching(module, plugin.fp32_modules)
    return [inner for pairs in found.values() for _, matched in pairs for inner in matched.modules()]


def _choice(plugin: AmpPrecision | None) -> Choice | None:
    record = None if plugin is None else plugin.last_step
    return Choice.of(record.precision) if record is not None and record.precision else None


def _slow_settings() -> Iterator[Setting]:
    if torch.is_anomaly_enabled():
        yield "anomaly detection"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms"
