"""`data-bound`: steps wait for their batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_amp._text import counted, percent
from lightning_amp.advice._record import Loading
from lightning_amp.advice.findings._finding import Evidence, Finding, graded
from lightning_amp.advice.findings._words import in_ms
from lightning_amp.measure import DATA

FASTER_LOADING = 0.7
"""A loader that takes less than this share of the wait counts as faster.

With noise of 20 % per batch, an equal loader seems that much faster in less than 1 % of trials of eight batches.
"""


def data_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding if waiting takes a tenth of a step; from a quarter of a step on, it is a warning."""
    share, wait_s = evidence.step.share(DATA), evidence.step.parts.get(DATA, 0.0)
    if share < 0.1 or wait_s < 2e-4:
        return
    text = f"A step waits {in_ms(wait_s)} for its batch, {percent(share)} of its time; no precision helps there."
    yield Finding(graded(share, 0.25), "data-bound", text, _action(evidence.step.loading), share)


def _action(loading: Loading | None) -> str:
    if loading is None:
        return "Make the loader faster: decode and collate in worker processes, or ahead of time."
    if loading.workers and not loading.persistent and loading.restart_s > 0.5 * loading.wait_s:
        return (
            f"Pass `persistent_workers=True` to the DataLoader: starting {counted(loading.workers, 'worker')} at each"
            f" epoch takes {in_ms(loading.restart_s)} of a step."
        )
    if better := _with_workers(loading):
        return better
    if loading.is_stream:
        return (
            "Do less per item. Pass `num_workers=...` only if the `IterableDataset` gives each worker its own rows"
            " (`torch.utils.data.get_worker_info`): otherwise every worker serves every row."
        )
    if not loading.tried:
        return "Pass `num_workers=...` to the DataLoader, or do less per item (decode once, and save the result)."
    others = ", ".join(f"{number}: {in_ms(seconds)}" for number, seconds in loading.tried)
    return (
        f"Other numbers of workers do not help (tried here, per batch: {others}). Do less per item, or fetch whole"
        " batches at once: a dataset with `__getitems__`, or one that indexes tensors by batch."
    )


def _with_workers(loading: Loading) -> str:
    """Advise the number of workers that was fastest, if it was clearly faster than the current loader; else empty."""
    workers, seconds = min(loading.tried, key=lambda pair: pair[1], default=(0, math.inf))
    if seconds >= FASTER_LOADING * loading.wait_s:
        return ""
    stay = ", persistent_workers=True" if workers else ""
    return f"Pass `num_workers={workers}{stay}` to the DataLoader: tried here, a batch then takes {in_ms(seconds)}."
