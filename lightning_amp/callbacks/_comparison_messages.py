"""What `MetricComparison` says beside its tables, each once per run."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._text import named
from lightning_amp.shadow import Failure


@final
class ComparisonMessages:
    """The messages of one run."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def _is_news(self, kind: str) -> bool:
        if kind in self._said:
            return False
        self._said.add(kind)
        return True

    def failed(self, trainer: Trainer, failure: Failure) -> None:
        """Say, on the rank where it happened, what ended a comparison."""
        if self._is_news("out of memory" if failure.out_of_memory else "error"):
            _messages.warn_on_this_rank(f"`MetricComparison` on rank {trainer.global_rank}: {failure.text}.")

    def one_sided(self, names: Sequence[str]) -> None:
        """Name the metrics that were logged on one side only."""
        if names and self._is_news("one side"):
            _messages.warn(
                f"`MetricComparison`: logged on one side only and not compared: {', '.join(names)}. A callback logs"
                " them, or the module does so depending on a value."
            )

    def nothing(self) -> None:
        """Say that there is nothing to compare."""
        if self._is_news("nothing"):
            _messages.warn("`MetricComparison` has nothing to compare: nothing was logged with `on_epoch=True`.")

    def unseen(self, names: Sequence[str]) -> None:
        """Name what cannot be looked into."""
        if names and self._is_news("unseen"):
            _messages.info(
                f"`MetricComparison` does not look into {named(names)}, which is compiled: `.module_table` has no rows"
                " for what is inside."
            )
