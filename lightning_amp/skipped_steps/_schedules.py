"""Advance learning-rate schedules only after applied steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import final, override

from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import HeldSchedule, Skip, Tally


@final
class HeldSchedules:
    """Suppresses `scheduler.step()` if all steps of its optimizer since the scheduler's last step were skipped.

    This rule works for schedules per step, with accumulation, and for manual schedules per batch or epoch. If the
    optimizer did not step in between, the scheduler steps, as in fp32. In automatic optimization, schedules with
    interval "epoch" and plateau schedules are left alone.

    If only the device has the skip flag, `scheduler.step()` is noted. The noted step is decided just
    before the optimizer's next step, or when code reads the rate through the scheduler. If callbacks or the module read
    the rate between two steps, the step is decided at once.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._strategy = module.trainer.strategy
        self._automatic = module.automatic_optimization
        self._tallies: dict[int, Tally] = {}
        self._held: list[HeldSchedule] = []
        self._overrides_scheduler_step = _overrides(module, "lr_scheduler_step", LightningModule)
        hooked = self._overrides_scheduler_step and self._automatic
        self._hook = HeldSchedulerHook(module, self._tallies) if hooked else None
        callbacks: list[Callback] = module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        read = any(_looks_at_rates(c) for c in (*callbacks, module))
        self._rate_read_between_steps = self._overrides_scheduler_step or read

    def __bool__(self) -> bool:
        return bool(self._tallies)

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the host needs the skip flag right after the step of this optimizer."""
        return self._rate_read_between_steps and any(t.optimizer is optimizer for t in self._tallies.values())

    def attach(self) -> None:
        """Hold all schedulers. The LR finder and `StochasticWeightAveraging` replace some schedulers during a fit."""
        for config in self._strategy.lr_scheduler_configs:
            scheduler = config.scheduler
            if id(scheduler) in self._tallies or (self._automatic and config.interval != "step"):
                continue
            if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                tally = self._tallies[id(scheduler)] = Tally(scheduler, scheduler.optimizer)
                self._held.append(HeldSchedule(scheduler, tally))
            elif self._overrides_scheduler_step and not config.reduce_on_plateau:
                optimizer = getattr(scheduler, "optimizer", self._module.trainer.optimizers[0])
                self._tallies[id(scheduler)] = Tally(scheduler, optimizer)
        if self._hook is not None and self._tallies:
            self._hook.install()

    def observe(self, optimizer: Optimizer, skip: Skip) -> None:
        """Record whether a step was skipped."""
        for tally in self._tallies.values():
            tally.observe(optimizer, skip)

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide the noted scheduler steps of an optimizer that is about to step, and needs its learning rate now."""
        for held in self._held:
            if held.optimizer is optimizer:
                held.resolve()

    def detach(self) -> None:
        """Restore the schedulers."""
        if self._hook is not None:
            self._hook.restore()
        for held in self._held:
            held.close()
        self._held.clear()
        self._tallies.clear()


@final
class HeldSchedulerHook(MethodOverride):
    """Suppresses a user's `lr_scheduler_step`, which may call other methods than `step()` (timm: `step_update`)."""

    def __init__(self, module: LightningModule, tallies: Mapping[int, Tally]) -> None:
        super().__init__(module, "lr_scheduler_step")
        self._tallies = tallies

    @override
    def __call__(self, scheduler: Any, metric: Any) -> None:
        tally = self._tallies.get(id(scheduler))
        skips = [] if tally is None else tally.take()
        if not skips or not all(skip.wait() for skip in skips):
            self.inner(scheduler, metric)


def _looks_at_rates(owner: Callback | LightningModule) -> bool:
    """Return whether Lightning code or a user's hook in `owner` may read `param_groups` between two steps."""
    if isinstance(owner, LearningRateMonitor) or type(owner).__module__.startswith("lightning.pytorch.tuner"):
        return True
    base = Callback if isinstance(owner, Callback) else LightningModule
    users = not type(owner).__module__.startswith(("lightning.", "lightning_amp."))
    return users and any(_overrides(owner, name, base) for name in ("on_train_batch_start", "on_train_batch_end"))


def _overrides(owner: object, name: str, base: type) -> bool:
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)
