"""Trials of a loader with other numbers of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from lightning_amp.advice import _loading
from lightning_amp.advice._loading import batch_s, loading_of, serves_each_row_once

ROWS = 64


class Whole(IterableDataset[Any]):
    """Serve every row in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(ROWS)))


class Shared(IterableDataset[Any]):
    """Give each worker its own rows."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(torch.arange(float(ROWS))[first::step])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(())


@pytest.mark.parametrize(("dataset", "once"), [(Whole(), False), (Shared(), True)])
@pytest.mark.parametrize("batch_size", [8, 5, None])
def test_rows_are_counted_with_workers_and_without(dataset: Any, batch_size: int | None, once: bool) -> None:
    assert serves_each_row_once(DataLoader(dataset, batch_size=batch_size), 2) is once


def test_a_stream_without_an_end_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loading, "_TRIAL_S", 0.05)
    assert not serves_each_row_once(DataLoader(Endless(), batch_size=8), 2)


@pytest.mark.parametrize(("dataset", "tried"), [(Whole(), []), (Shared(), [2])])
def test_only_workers_that_serve_each_row_once_are_tried(
    dataset: Any, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loading.os, "cpu_count", lambda: 2)
    found = loading_of(DataLoader(dataset, batch_size=2), 0.1, 0.0, [], is_slow=True)
    assert found is not None
    assert found.is_stream
    assert [workers for workers, _ in found.tried] == tried


def test_a_dataset_with_indices_is_tried_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loading.os, "cpu_count", lambda: 2)
    rows = DataLoader(TensorDataset(torch.ones(ROWS, 2)), batch_size=2)
    found = loading_of(rows, 0.1, 0.0, [], is_slow=True)
    assert found is not None
    assert not found.is_stream
    assert [workers for workers, _ in found.tried] == [2]
    assert loading_of(rows, 0.1, 0.0, [], is_slow=False) is not None
    assert loading_of([1, 2], 0.1, 0.0, [], is_slow=True) is None


def test_too_few_batches_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loading.os, "cpu_count", lambda: 2)
    notes: list[str] = []
    found = loading_of(DataLoader(TensorDataset(torch.ones(4, 2))), 0.1, 0.0, notes, is_slow=True)
    assert found is not None
    assert found.tried == ()
    assert notes == ["loading with 2 workers was not tried: ValueError: there are too few batches"]


class Loader:
    """Take a second for each batch, and a minute to end the workers."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.left = clock, 100

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        self.clock[0] += 1.0
        self.left -= 1
        return self.left

    def __del__(self) -> None:
        self.clock[0] += 60.0


def test_the_end_of_the_workers_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(_loading, "_with_workers", lambda loader, workers: Loader(clock))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert batch_s(DataLoader([1]), 2, 1.0) == pytest.approx(1.0)  # type: ignore[arg-type]
