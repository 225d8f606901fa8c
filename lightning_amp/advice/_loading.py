"""Measure how fast a DataLoader is with different numbers of worker processes, without training."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_amp.advice._record import Loading
from lightning_amp.compare import num_rows

_TRIAL_S = 2.0
"""Seconds for one trial, not counting the start of its workers."""
_LEAST_BATCHES, _MOST_BATCHES = 8, 40


def loading_of(loader: Any, wait_s: float, restart_s: float, notes: list[str], *, is_slow: bool) -> Loading | None:
    """Return how batches are loaded; `None` if the loader is not a plain `DataLoader`.

    If `is_slow`, other numbers of workers are tried, and `notes` gets a note for each trial that failed.
    """
    if type(loader) is not DataLoader:
        return None
    is_stream = isinstance(loader.dataset, IterableDataset)
    found = Loading(loader.num_workers, wait_s, restart_s, loader.persistent_workers, is_stream=is_stream)
    if not is_slow:
        return found
    tried: list[tuple[int, float]] = []
    for workers in sorted({0, max(2, min(8, os.cpu_count() or 2)), 2 * loader.num_workers} - {loader.num_workers}):
        try:
            if is_stream and workers and not serves_each_row_once(loader, workers):
                continue
            tried.append((workers, batch_s(loader, workers, wait_s)))
        except Exception as error:
            notes.append(f"loading with {workers} workers was not tried: {type(error).__name__}: {error}")
    return replace(found, tried=tuple(tried))


def batch_s(loader: DataLoader[Any], workers: int, alone_s: float) -> float:
    """Return the seconds per batch with `num_workers` workers, not counting the time to start and to end them."""
    wanted = max(_LEAST_BATCHES, 2 * workers, min(_MOST_BATCHES, int(_TRIAL_S / max(alone_s, 1e-4))))
    began = ended = time.perf_counter()
    number, before = 0, 2 * workers
    batches = iter(_with_workers(loader, workers))  # this name keeps the workers alive until the time is taken
    for _ in batches:
        number += 1
        ended = time.perf_counter()
        if workers and number == before:  # these batches were loaded while the workers started
            began = ended
        if number >= before + wanted:
            break
    if number - before < 1:
        raise ValueError("there are too few batches")
    return (ended - began) / (number - before)


def serves_each_row_once(loader: DataLoader[Any], workers: int) -> bool:
    """Return whether a stream yields as many rows with workers as without workers.

    It is `False` if reading the whole stream takes too long. A dataset that does not divide its rows by
    `get_worker_info` serves every row once per worker.
    """
    alone = _rows(loader, 0, most=None)
    return alone is not None and _rows(loader, workers, most=alone) == alone


def _rows(loader: DataLoader[Any], workers: int, most: int | None) -> int | None:
    """Count the rows of a stream; `None` if reading it takes too long, or if there are more than `most`."""
    began, number = time.perf_counter(), 0
    for batch in _with_workers(loader, workers):
        number += (num_rows(batch) or 1) if loader.batch_size is not None else 1
        if (most is None and time.perf_counter() - began > _TRIAL_S) or (most is not None and number > most):
            return None
    return number


def _with_workers(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    settings: dict[str, Any] = {"dataset": loader.dataset, "collate_fn": loader.collate_fn, "num_workers": workers}
    if isinstance(loader.dataset, IterableDataset):
        settings.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif loader.batch_sampler is not None:
        settings["batch_sampler"] = loader.batch_sampler
    else:
        settings.update(batch_size=loader.batch_size, sampler=loader.sampler)
    return DataLoader(**settings)
