"""Undo skipped steps outside the optimizer, for one fit: in schedules, averaged weights and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import final, override

from lightning_amp._compat import _lightning
from lightning_amp._compat._names import Callback, LearningRateMonitor, LightningModule, is_overridden
from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import Hold, Skip, StepResult
from lightning_amp.skipped_steps._kept_buffers import BufferPlace, KeptBuffers, norm_places


@final
class SkipProtection:
    """Holds back schedules and averaged weights, and restores buffers, after each skipped step.

    A schedule per step and a `WeightAveraging` do not advance if all steps since their last advance were skipped. In
    automatic optimization, schedules with interval "epoch" and plateau schedules are left alone. So is
    `StochasticWeightAveraging`, which averages once per epoch.

    Args:
        module: The user's module.
        named: Buffers to restore besides the statistics of normalisation layers.
        on: Whether steps may be skipped at all. If steps are never skipped, nothing is protected.

    """

    def __init__(self, module: LightningModule, named: Sequence[BufferPlace] = (), *, on: bool = True) -> None:
        self._module, self._on = module, on
        overrides = on and is_overridden("lr_scheduler_step", module)
        self._scheduler_step = _SchedulerStep(module, "lr_scheduler_step") if overrides else None
        if self._scheduler_step is not None:
            self._scheduler_step.install()
        self._rates_are_read = any(map(_reads_rates, (*self._callbacks, module)))
        self._holds: dict[int, Hold] = {}
        both = (norm_places(module), True), (named, False)
        self._buffers = [KeptBuffers(module, places, counted=counted) for places, counted in both if places and on]
        self._attach()

    @property
    def _callbacks(self) -> list[Callback]:
        return self._module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]

    def _attach(self) -> None:
        held = {id(target): (target, *how) for target, *how in (self._to_hold() if self._on else ())}
        for key in self._holds.keys() - held.keys():
            self._holds.pop(key).close()
        for key in held.keys() - self._holds.keys():
            self._holds[key] = hold = Hold(*held[key])
            if isinstance(hold.target, Callback):
                hold.observe(None, Skip.YES)  # no step so far

    def _to_hold(self) -> Iterator[tuple[Any, ...]]:
        """Return the arguments of all holds. Schedules and callbacks are made or replaced during a fit."""
        averages = [callback for callback in self._callbacks if _lightning.is_weight_averaging(callback)]
        yield from ((average, ["should_update"], _no_update) for average in averages)
        for finder in filter(_lightning.is_lr_finder, self._callbacks):
            yield finder, ["on_train_batch_end"], _lightning.without_lr_finder_result
            return  # its schedule goes on, since it must not try a rate twice
        schedulers = [c.scheduler for c in self._module.trainer.strategy.lr_scheduler_configs if self._is_per_step(c)]
        yield from ((scheduler, ["step"]) for scheduler in schedulers if isinstance(scheduler, LRScheduler))
        if schedulers and self._scheduler_step is not None:
            yield self._scheduler_step, ["__call__"], self._step_others

    def _is_per_step(self, config: Any) -> bool:
        plateau = config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau)
        return not plateau and (not self._module.automatic_optimization or config.interval == "step")

    def _step_others(self, call: Callable[..., Any], scheduler: Any, metric: Any) -> None:
        configs = self._module.trainer.strategy.lr_scheduler_configs
        if not any(self._is_per_step(config) for config in configs if config.scheduler is scheduler):
            call(scheduler, metric)

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the host needs the skip flag right after the step of this optimizer."""
        at_once = [hold for hold in self._holds.values() if self._rates_are_read or not hold.notes]
        return any(hold.optimizer is None or hold.optimizer is optimizer for hold in at_once)

    def enter_step(self) -> None:
        """Prepare for a training step."""
        self._attach()
        for buffers in self._buffers:
            buffers.enter_step()

    def note_backward(self) -> None:
        """Record that the training step had a backward, so an optimizer step will follow."""
        for buffers in self._buffers:
            buffers.note_backward()

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide the noted schedule steps of an optimizer that is about to step, and needs its learning rate now."""
        for hold in self._holds.values():
            if hold.optimizer is optimizer:
                hold.resolve()

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Undo the step in schedules, averaged weights and buffers if it was skipped."""
        for hold in self._holds.values():
            hold.observe(optimizer, result.skip)
        for buffers in self._buffers:
            buffers.observe(optimizer, result, manual=not self._module.automatic_optimization)

    def settle(self, *, in_window: bool = False) -> None:
        """Remove non-finite values from buffers after a pass without steps.

        With `in_window`, also within a window, before validation or a checkpoint: the run that loads it cannot drop the
        window, since the checkpoint has no gradients.
        """
        for buffers in self._buffers:
            buffers.settle(in_window=in_window)

    def detach(self) -> None:
        """Restore the user's objects."""
        self.settle()
        for hold in self._holds.values():
            hold.close()
        if self._scheduler_step is not None:
            self._scheduler_step.restore()
        self._holds, self._buffers = {}, []


@final
class _SchedulerStep(MethodOverride):
    """A user's `lr_scheduler_step`, which may call other methods of a scheduler, such as timm's `step_update`."""

    @override
    def __call__(self, scheduler: Any, metric: Any) -> None:
        self.inner(scheduler, metric)


def _no_update(call: Callable[..., Any], step_idx: int | None = None, epoch_idx: int | None = None) -> Any:
    """Stand for `should_update` of an average. Its update at the end of an epoch is not held."""
    return False if step_idx is not None else call(epoch_idx=epoch_idx)


def _reads_rates(owner: Callback | LightningModule) -> bool:
    """Return whether Lightning's monitor or a user's hook in `owner` may read `param_groups` between two steps."""
    if isinstance(owner, LearningRateMonitor):
        return True
    if type(owner).__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_amp.")):
        return False
    base = Callback if isinstance(owner, Callback) else LightningModule
    return any(is_overridden(name, owner, base) for name in ("on_train_batch_start", "on_train_batch_end"))
