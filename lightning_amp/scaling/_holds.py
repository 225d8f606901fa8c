"""Hold back what must not happen after a skipped step: schedules, and calls such as the update of averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import final

from lightning_amp._compat import _modules, _torch
from lightning_amp.scaling._scalars import Skip


def _call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _drop(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


@final
class Hold:
    """Holds back calls of some methods of `target` if all steps since the last call that ran were skipped.

    The target's class is replaced by a subclass that overrides these methods. The target gets no new attributes,
    because the `state_dict` of a scheduler contains its whole `__dict__`.

    If only the device has the flag, a call waits for it. Only `step` of a scheduler does not wait. It is noted, and
    decided right before the next step of its optimizer, or when code reads the rate through the scheduler.

    Args:
        target: A scheduler, an average, or any other object.
        methods: The names of the methods.
        instead: Called instead of a held call, with the bound method and the arguments of the call.

    Attributes:
        notes: Whether calls are noted, so that they do not wait.
        optimizer: The optimizer whose steps count; `None`: any.

    """

    def __init__(self, target: Any, methods: Sequence[str], instead: Callable[..., Any] = _drop) -> None:
        self.target, self._instead = target, instead
        self.notes = isinstance(target, LRScheduler) and list(methods) == ["step"]
        self.optimizer = _torch.unwrap_optimizer(target.optimizer) if self.notes else None
        self._all_skipped: Skip | None = None  # `None`: no step since the last call that ran
        self._noted: Callable[[], Any] | None = None
        self._hooks: list[Any] = []
        self._base: type[Any] = type(target)
        members = {name: self._override(name, self._note if self.notes else self._decide) for name in methods}
        if self.optimizer is not None:
            members |= {name: self._override(name, _call) for name in ("state_dict", "load_state_dict", "get_last_lr")}
            # A checkpoint reads and loads the optimizer's state, with its learning rate, before the scheduler's state.
            self._hooks = [
                self.optimizer.register_state_dict_pre_hook(lambda _: self.resolve()),
                self.optimizer.register_load_state_dict_pre_hook(lambda _, __: self.resolve()),
            ]
        self._class = _modules.swap_class(target, members, before_pickle=self.resolve)

    def _override(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        function = getattr(self._base, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.resolve()
            return run(MethodType(function, this), *args, **kwargs)

        return method

    def _note(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._noted = partial(self._decide, call, *args, **kwargs)
        if self._all_skipped is None or self._all_skipped.known is not None:
            self.resolve()

    def _decide(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._all_skipped is not None and self._all_skipped.wait():
            self._all_skipped = Skip.YES
            return self._instead(call, *args, **kwargs)
        self._all_skipped = None
        return call(*args, **kwargs)

    def observe(self, optimizer: Optimizer | None, skip: Skip) -> None:
        """Record whether a step was skipped, if it is a step of this optimizer."""
        if self.optimizer is not None and self.optimizer is not optimizer:
            return
        before = self._all_skipped or Skip.YES
        if isinstance(before.value, Tensor) and skip.known is None:
            skip = Skip(torch.minimum(before.value, skip.flag(before.value.device)))
        self._all_skipped = before if skip.known or before.known is False else skip

    def resolve(self) -> None:
        """Decide the noted call. This waits for the device."""
        decide, self._noted = self._noted, None
        if decide is not None:
            decide()

    def close(self) -> None:
        """Restore the target's class, unless other code has changed it since."""
        try:
            self.resolve()
        finally:
            self._all_skipped = None
            for hook in self._hooks:
                hook.remove()
            if type(self.target) is self._class:
                self.target.__class__ = self._base
