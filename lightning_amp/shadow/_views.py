"""Views that stand in for the trainer, its strategy, plugin and loggers in a shadow."""

from __future__ import annotations

from functools import partial
from typing import Any

from typing_extensions import final

from lightning_amp.precision import AmpPrecision


@final
class View:
    """Reads attributes of another object; attributes that are set on the view do not reach that object.

    A property reads the attributes of the view. A method gets the other object as `self`.

    Args:
        target: The other object.
        calls: Stands for all methods that `attributes` does not have: `NOTHING` in a logger, whose service does nothing
            then either, or an object that raises. `None`: the methods themselves.
        attributes: Attributes to set on the view.

    """

    def __init__(self, target: Any, *, calls: Any = None, **attributes: Any) -> None:
        vars(self).update(attributes, view_target=target, view_calls=calls)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        calls = own["view_calls"]
        if calls is NOTHING and name in ("experiment", "run"):
            return NOTHING
        prop = getattr(type(own["view_target"]), name, None)
        value = prop.fget(self) if type(prop) is property and prop.fget else getattr(own["view_target"], name)
        return calls if calls is not None and callable(value) else value

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `isinstance(self.trainer.strategy, DDPStrategy)` in user code takes the same branch in the shadow.
        return type(vars(self)["view_target"])


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

    __setattr__ = __setitem__ = __exit__ = lambda *_: None

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


NOTHING = _Nothing()


def replaying(plugin: Any, **attributes: Any) -> Any:
    """Return a view of the precision plugin whose `scaled_grad` leaves its scale unchanged."""
    own = {"scaled_grad": partial(plugin.scaled_grad, learn=False)} if isinstance(plugin, AmpPrecision) else {}
    return View(plugin, **own, **attributes)
