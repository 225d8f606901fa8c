"""Give private attributes of the objects of FSDP other values for a while."""

from __future__ import annotations

from typing import Any

from typing_extensions import final


@final
class Replaced:
    """Attributes that have other values until :meth:`restore`. Remove when `Fsdp1` and `Fsdp2` are gone."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, **attributes: Any) -> None:
        """Set attributes of an object.

        Raises:
            AttributeError: If the object has no such attribute.

        """
        for name, value in attributes.items():
            self._saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def replace_existing(self, owner: Any, **attributes: Any) -> None:
        """Set attributes, except those that the object does not have in this version of torch."""
        self.replace(owner, **{name: value for name, value in attributes.items() if hasattr(owner, name)})

    def restore(self) -> None:
        """Set all attributes to their earlier values, the latest first."""
        while self._saved:
            setattr(*self._saved.pop())
