"""Tell a user who passes a class to the Trainer that it wants an instance."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from typing_extensions import override


class NamesItsClass(ABCMeta):
    """The class of our plugin and callback classes, which have no hook that runs before Lightning's own error."""

    @override
    def __str__(cls) -> str:
        """Return the class as Lightning writes it into its error about a plugin of an invalid type."""
        return f"`{cls.__name__}`, which is a class (write `{cls.__name__}(...)`)"

    @property
    def state_key(cls) -> Any:
        """Raise an `AttributeError`: Lightning reads this attribute of each callback when the Trainer is made."""
        raise AttributeError(f"`callbacks` has {cls}.")
