"""Update averaged weights only after applied steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.scaling import Skip


@final
class HeldAverages:
    """Holds `WeightAveraging.should_update(step_idx=...)` unless a step was applied since the last update.

    Updating an average reads its counter on the host anyway, so the host reads the flag too. It leaves
    `StochasticWeightAveraging` alone, which averages once per epoch.
    """

    def __init__(self, callbacks: list[Callback]) -> None:
        self._callbacks = callbacks
        self._applied = 0
        self._held: list[tuple[Callback, type[Any], type[Any]]] = []

    def attach(self) -> None:
        """Hold the averages, until :meth:`detach`."""
        averaging = [callback for callback in self._callbacks if _lightning.is_weight_averaging(callback)]
        self._held = [(callback, type(callback), self._hold(callback)) for callback in averaging]

    def __bool__(self) -> bool:
        return bool(self._held)

    def observe(self, skip: Skip) -> None:
        """Count a step that was not skipped. The host knows already; see `SkipProtection.host_must_know`."""
        self._applied += not skip.wait()

    def _hold(self, callback: Any) -> type[Any]:
        """Give a callback a class that holds it, and return that class."""
        base: type[Any] = type(callback)
        counted, averages = self._applied, self

        def should_update(this: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            nonlocal counted
            if step_idx is not None and averages._held:  # else a class that somebody derived from ours is still in use
                if averages._applied == counted:
                    return False
                counted = averages._applied
            return base.should_update(this, step_idx=step_idx, epoch_idx=epoch_idx)

        return _modules.swap_class(callback, {"should_update": should_update})

    def detach(self) -> None:
        """Give callbacks their own classes back, unless somebody has given them another one since."""
        for callback, base, held in self._held:
            if type(callback) is held:
                callback.__class__ = base
        self._held.clear()
