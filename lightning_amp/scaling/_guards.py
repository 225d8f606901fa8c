"""Hold back what must not happen after a skipped step: schedules, and calls such as the update of averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp.scaling._scalars import Skip

_MAX_SKIPS = 64
"""Number of outcomes after which a tally combines them on the device."""


@final
class Tally:
    """The skips of an optimizer since its schedule, or an average, last moved."""

    def __init__(self, owner: Any, optimizer: Optimizer | None) -> None:
        self.owner = owner  # this reference also keeps the `id` from being reused
        self.optimizer = optimizer  # `None`: any
        self.skips: list[Skip] = []

    def observe(self, optimizer: Optimizer, skip: Skip) -> None:
        """Add the outcome of a step, if it is a step of this optimizer."""
        if self.optimizer is not None and self.optimizer is not optimizer:
            return
        if skip.known is False:  # one applied step decides
            self.skips.clear()
        self.skips.append(skip)
        if len(self.skips) > _MAX_SKIPS:
            flags = [each.value for each in self.skips if isinstance(each.value, Tensor)]
            applied = any(each.known is False for each in self.skips)
            all_skipped = torch.stack([flag.to(flags[0].device) for flag in flags]).amin() if flags else True
            self.skips = [Skip.NO if applied else Skip(all_skipped)]

    def take(self) -> list[Skip]:
        """Return the skips so far, and reset them."""
        skips, self.skips = self.skips, []
        return skips


@final
class HeldSchedule:
    """One held scheduler.

    The scheduler's class is replaced by a subclass that overrides `step`. The scheduler gets no new attributes, because
    its `state_dict` contains its whole `__dict__`.
    """

    def __init__(self, scheduler: LRScheduler, tally: Tally) -> None:
        assert tally.optimizer is not None
        self.optimizer = tally.optimizer
        self._scheduler, self._tally = scheduler, tally
        self._noted: tuple[list[Skip], tuple[Any, ...], dict[str, Any]] | None = None
        self._base = base = type(scheduler)
        held = self

        def step(_: Any, *args: Any, **kwargs: Any) -> None:
            held.step(*args, **kwargs)

        def resolved(name: str) -> Callable[..., Any]:
            def method(this: Any, *args: Any, **kwargs: Any) -> Any:
                held.resolve()
                return getattr(base, name)(this, *args, **kwargs)

            return method

        # A checkpoint reads and loads the optimizer's state, with its learning rate, before the scheduler's state.
        self._hooks = (
            self.optimizer.register_state_dict_pre_hook(lambda _: held.resolve()),
            self.optimizer.register_load_state_dict_pre_hook(lambda _, __: held.resolve()),
        )
        members = {name: resolved(name) for name in ("state_dict", "load_state_dict", "get_last_lr")}
        self._class = _modules.swap_class(scheduler, {**members, "step": step}, before_pickle=self.resolve)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step unless all steps of the optimizer were skipped. If only the device has the flag, note the step."""
        self.resolve()
        skips = self._tally.take()
        known = [skip.known for skip in skips]
        if not skips or False in known:
            self._base.step(self._scheduler, *args, **kwargs)
        elif None in known:
            self._noted = (skips, args, kwargs)

    def resolve(self) -> None:
        """Decide the noted step. This waits for the device."""
        if self._noted is None:
            return
        (skips, args, kwargs), self._noted = self._noted, None
        if not all(skip.wait() for skip in skips):
            kind = self._base if isinstance(self._scheduler, self._base) else type(self._scheduler)
            kind.step(self._scheduler, *args, **kwargs)

    def close(self) -> None:
        """Restore the scheduler's class, unless other code has changed it since."""
        try:
            self.resolve()
        finally:
            for hook in self._hooks:
                hook.remove()
            if type(self._scheduler) is self._class:
                self._scheduler.__class__ = self._base  # pyright: ignore[reportAttributeAccessIssue]


def hold_calls(target: Any, methods: tuple[str, ...], tally: Tally) -> None:
    """Have these methods do nothing, and return `None`, if all steps since the last call were skipped.

    If only the device has the result, a call waits for it. A pickle or copy of `target` has its own class again.
    """
    base: Any = type(target)

    def held(name: str) -> Callable[..., Any]:
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            skips = tally.take()
            if skips and all(skip.wait() for skip in skips):
                return None
            return getattr(base, name)(this, *args, **kwargs)

        return method

    _modules.swap_class(target, {name: held(name) for name in methods})
