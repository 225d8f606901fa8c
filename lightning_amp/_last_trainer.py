"""Find out whether a fit continues the one before it or starts with new counts."""

from __future__ import annotations

import weakref
from typing import Any

from typing_extensions import final


@final
class LastTrainer:
    """Remembers the Trainer of the last fit without keeping it alive.

    A second fit of the same Trainer continues the counts, as Lightning's own counters do. A fit in another Trainer
    starts with new counts, as for k folds. A copy of this object remembers no Trainer.
    """

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None

    def goes_on(self, trainer: Any) -> bool:
        """Return whether a new fit continues the last one, and remember its Trainer."""
        same = self._trainer is not None and self._trainer() is trainer
        self._trainer = weakref.ref(trainer)
        return same

    def __reduce__(self) -> tuple[Any, ...]:
        return LastTrainer, ()
