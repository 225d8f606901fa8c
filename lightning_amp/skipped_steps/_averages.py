"""Update averaged weights only after applied steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules
from lightning_amp.scaling import Skip


@final
class HeldAverages:
    """Holds back `WeightAveraging` updates unless a step was applied since the last update.

    An update of an average waits for the device to read its counter anyway, so the host reads the skip flag as well.
    For this, `should_update(step_idx=...)` returns `False`. `StochasticWeightAveraging` is left alone, because it
    averages once per epoch.
    """

    def __init__(self, callbacks: list[Callback]) -> None:
        self._callbacks = callbacks
        self._applied = 0
        self._held: list[tuple[Callback, type[Any], type[Any]]] = []

    def attach(self) -> None:
        """Hold back the averages' updates, until :meth:`detach`."""
        averaging = [callback for callback in self._callbacks if _lightning.is_weight_averaging(callback)]
        self._held = [(callback, type(callback), self._hold(callback)) for callback in averaging]

    def __bool__(self) -> bool:
        return bool(self._held)

    def observe(self, skip: Skip) -> None:
        """Count a step that was not skipped. The host already has the flag; see `SkipProtection.host_must_know`."""
        self._applied += not skip.wait()

    def _hold(self, callback: Any) -> type[Any]:
        """Replace the class of a callback by a subclass that holds back its updates, and return that subclass."""
        base: type[Any] = type(callback)
        counted, averages = self._applied, self

        def should_update(this: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            nonlocal counted
            if step_idx is not None and averages._held:  # otherwise a class that was derived from ours is still in use
                if averages._applied == counted:
                    return False
                counted = averages._applied
            return base.should_update(this, step_idx=step_idx, epoch_idx=epoch_idx)

        return _modules.swap_class(callback, {"should_update": should_update})

    def detach(self) -> None:
        """Restore the classes of the callbacks, unless other code has changed them since."""
        for callback, base, held in self._held:
            if type(callback) is held:
                callback.__class__ = base
        self._held.clear()
