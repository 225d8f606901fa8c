"""Learning-rate schedules see only applied steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import Skip


@final
class HeldSchedules:
    """Holds `scheduler.step()` where all steps of its optimizer since the scheduler's last step were skipped.

    One rule serves every way of driving a schedule: per step, with accumulation, by hand per batch, by hand per epoch
    (no step in between is no reason to hold, as in fp32). In automatic optimization schedules with interval "epoch" and
    plateau schedules run as ever.

    Where a fused optimizer keeps the answer on the device, `scheduler.step()` is only noted, and decided just before
    the optimizer's next step or when somebody asks for the rate. Where callbacks or the module look at the rate between
    two steps, it is decided at once.

    Args:
        module: The user's.

    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._strategy = module.trainer.strategy
        self._automatic = module.automatic_optimization
        self._gates: dict[int, _Tally] = {}
        self._own_verb = _overrides(module, "lr_scheduler_step", LightningModule)
        self._verb = _HeldVerb(module, self._gates) if self._own_verb and self._automatic else None
        callbacks: list[Callback] = module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self.at_once = self._own_verb or any(_looks_at_rates(c) for c in (*callbacks, module))

    def __bool__(self) -> bool:
        return bool(self._gates)

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the answer is needed right after the step of this optimizer."""
        return self.at_once and any(gate.optimizer is optimizer for gate in self._gates.values())

    def attach(self) -> None:
        """Hold what schedulers there are; the LR finder and `StochasticWeightAveraging` replace them during a fit."""
        for config in self._strategy.lr_scheduler_configs:
            scheduler = config.scheduler
            if id(scheduler) in self._gates or (self._automatic and config.interval != "step"):
                continue
            if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                self._gates[id(scheduler)] = _HeldSchedule(scheduler)
            elif self._own_verb and not config.reduce_on_plateau:
                optimizer = getattr(scheduler, "optimizer", self._module.trainer.optimizers[0])
                self._gates[id(scheduler)] = _Tally(scheduler, optimizer)
        if self._verb is not None and self._gates:
            self._verb.install()

    def observe(self, optimizer: Optimizer, skip: Skip) -> None:
        """Note what became of a step."""
        for gate in self._gates.values():
            if gate.optimizer is optimizer:
                gate.add(skip)

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide what was noted for an optimizer that is about to step: it needs its rate now."""
        for gate in self._gates.values():
            if gate.optimizer is optimizer:
                gate.resolve()

    def detach(self) -> None:
        """Leave schedulers as they were."""
        if self._verb is not None:
            self._verb.restore()
        for gate in self._gates.values():
            gate.close()
        self._gates.clear()


class _Tally:
    """The skips of one optimizer since its schedule last moved."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        self._skips: list[Skip] = []

    def add(self, skip: Skip) -> None:
        """Note what became of a step."""
        self._skips.append(skip)

    def take(self) -> list[Skip]:
        """Return what was noted, and begin anew."""
        skips, self._skips = self._skips, []
        return skips

    def take_held(self) -> bool:
        """Return whether all steps were skipped, and begin anew. Waits for the device."""
        skips = self.take()
        return bool(skips) and all(skip.wait() for skip in skips)

    def resolve(self) -> None:
        """Decide what was noted."""

    def close(self) -> None:
        """Leave the scheduler as it was."""


@final
class _HeldVerb(MethodOverride):
    """The `lr_scheduler_step` of a module that does not call `step()` (timm's `step_update`)."""

    def __init__(self, module: LightningModule, gates: dict[int, _Tally]) -> None:
        super().__init__(module, "lr_scheduler_step")
        self._gates = gates

    @override
    def __call__(self, scheduler: Any, metric: Any) -> None:
        gate = self._gates.get(id(scheduler))
        if gate is None or not gate.take_held():
            self.inner(scheduler, metric)


@final
class _HeldSchedule(_Tally):
    """One scheduler.

    Its class is a subclass that differs in `step`. State lives here, not in the scheduler, whose `state_dict` is all of
    its `__dict__`.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler, scheduler.optimizer)
        self._noted: tuple[list[Skip], tuple[Any, ...], dict[str, Any]] | None = None
        self._base = base = type(scheduler)
        gate = self

        def step(_: Any, *args: Any, **kwargs: Any) -> None:
            gate.step(*args, **kwargs)

        def resolved(name: str) -> Callable[..., Any]:
            def method(this: Any, *args: Any, **kwargs: Any) -> Any:
                gate.resolve()
                return getattr(base, name)(this, *args, **kwargs)

            return method

        def __reduce_ex__(this: Any, protocol: Any) -> Any:  # noqa: N807
            gate.resolve()
            return _modules.reduce_as(this, base)

        # A checkpoint takes the optimizer's state, learning rate included, before it asks the scheduler for its own.
        self._hook = self.optimizer.register_state_dict_pre_hook(lambda _: gate.resolve())
        members = {name: resolved(name) for name in ("state_dict", "load_state_dict", "get_last_lr")}
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        members |= {"step": step, "__reduce_ex__": __reduce_ex__}
        scheduler.__class__ = self._held = type(base.__name__, (base,), {**names, **members})

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.resolve()
        skips = self.take()
        known = [skip.known for skip in skips]
        if not skips or False in known:
            self._base.step(self.scheduler, *args, **kwargs)
        elif None in known:
            self._noted = (skips, args, kwargs)

    @override
    def resolve(self) -> None:
        if self._noted is None:
            return
        (skips, args, kwargs), self._noted = self._noted, None
        if not all(skip.wait() for skip in skips):
            kind = self._base if isinstance(self.scheduler, self._base) else type(self.scheduler)
            kind.step(self.scheduler, *args, **kwargs)

    @override
    def close(self) -> None:
        try:
            self.resolve()
        finally:
            self._hook.remove()
            if type(self.scheduler) is self._held:  # somebody may have given it another class since, which stays
                self.scheduler.__class__ = self._base  # pyright: ignore[reportAttributeAccessIssue]


def _looks_at_rates(owner: Callback | LightningModule) -> bool:
    """Return whether this may read `param_groups` between two steps: by its purpose, or in a hook of the user's."""
    if isinstance(owner, LearningRateMonitor) or type(owner).__module__.startswith("lightning.pytorch.tuner"):
        return True
    base = Callback if isinstance(owner, Callback) else LightningModule
    users = not type(owner).__module__.startswith(("lightning.", "lightning_amp."))
    return users and any(_overrides(owner, name, base) for name in ("on_train_batch_start", "on_train_batch_end"))


def _overrides(owner: object, name: str, base: type) -> bool:
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)
