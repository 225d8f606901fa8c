"""Views that stand in for the trainer, its strategy, plugin and loggers in a shadow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import final

from lightning_amp.precision import AmpPrecision


@final
class View:
    """Reads attributes of another object; attributes that are set on the view do not reach that object.

    Args:
        target: The other object.
        view_read: Called with the name and the value of each attribute that is read from the target; returns the value
            that the view shows.
        attributes: Attributes to set on the view.

    """

    def __init__(self, target: Any, *, view_read: Callable[[str, Any], Any] | None = None, **attributes: Any) -> None:
        vars(self).update(attributes, view_target=target, view_read=view_read, view_computed={})

    def compute(self, name: str, value: Callable[[], Any]) -> None:
        """Let reads of the attribute `name` return `value()`."""
        vars(self)["view_computed"][name] = value

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name in own["view_computed"]:
            return own["view_computed"][name]()
        value = getattr(own["view_target"], name)
        return value if own["view_read"] is None else own["view_read"](name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `isinstance(self.trainer.strategy, DDPStrategy)` in user code takes the same branch in the shadow.
        return type(vars(self)["view_target"])


def silent_logger(logger: Any) -> View:
    """Return a view of a user's logger that writes nothing."""
    return View(logger, view_read=_silent)


def _silent(name: str, value: Any) -> Any:
    # Loggers name the handle of their service `experiment` or `run`.
    return NOTHING if name in ("experiment", "run") or callable(value) else value


@final
class _Nothing:
    """Accepts any call and attribute access, and does nothing."""

    def _itself(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __getitem__ = __enter__ = _itself

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _ignore(self, *_: Any) -> None:
        return None

    __setattr__ = __setitem__ = __exit__ = _ignore

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


NOTHING = _Nothing()


@final
class SilentProgressBar:
    """A progress bar for `LightningModule.print`, which prints nothing."""

    is_enabled = True

    def print(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def replaying(plugin: Any, **attributes: Any) -> Any:
    """Return a view of the precision plugin whose `scaled_grad` leaves its scale unchanged."""
    own = {"scaled_grad": partial(plugin.scaled_grad, learn=False)} if isinstance(plugin, AmpPrecision) else {}
    return View(plugin, **own, **attributes)
