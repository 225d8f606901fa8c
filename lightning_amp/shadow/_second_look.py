"""Whether a compared evaluation shows something that is worth a warning, and the search for its reason."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp.reports import ComparisonTable, EvaluationReport
from lightning_amp.shadow._evaluation_search import examine_metric
from lightning_amp.shadow._paired_evaluation import PairedEvaluation
from lightning_amp.shadow._ranks import gather

_MAX_SEARCHES = 3
"""How often a run looks in vain, before it looks no more."""


@final
class SecondLook:
    """Looks at each comparison of a run until it has found something.

    Attributes:
        reports: What it found, one for each rank that did, on all ranks.

    """

    def __init__(self) -> None:
        self.reports: list[EvaluationReport] = []
        self._num_searches = 0

    def look(
        self, trainer: Trainer, module: LightningModule, comparison: PairedEvaluation, table: ComparisonTable
    ) -> str:
        """Return what to warn of; empty if there is nothing, or it was said. All ranks must call.

        Where no metric stands out this costs nothing but reading the table.
        """
        if self.reports or self._num_searches >= _MAX_SEARCHES:
            return ""
        batches = comparison.batches
        directions = _lightning.metric_directions(trainer)

        def num_rows(metric: str) -> int | None:
            # an error (`MeanAbsoluteError`), not a share
            return None if directions.get(metric) == "min" else batches.num_rows_of(metric)

        row = table.standing_out(num_rows, batches.standard_error)
        found = next(filter(None, gather(trainer, None if row is None else (row.metric, row.amp, row.fp32))), None)
        if found is None:
            return ""
        self._num_searches += 1
        metric, amp, fp32 = found
        reports = examine_metric(trainer, module, comparison.stage, batches, comparison.weights, metric, (amp, fp32))
        known = [report for report in reports if report.cause != "unknown"]
        self.reports = known or reports[:1]
        said = {str(replace(report, rank=0)): str(report) for report in self.reports}
        return "\n".join(said.values())
