"""Search for the largest batch size that fits, in one precision after the other."""

from __future__ import annotations

import math

from typing_extensions import final

from lightning_amp._text import listed, rounded
from lightning_amp.compare import Progress, Run, Spec
from lightning_amp.tune.batch_size._learning_rate import suggested_rate
from lightning_amp.tune.batch_size._next_size import MOST_RUNS, largest_within, next_size
from lightning_amp.tune.batch_size._probe import Facts
from lightning_amp.tune.batch_size._result import BatchSizeResult, Measurement
from lightning_amp.tune.batch_size._short_runs import ShortRuns, failure, is_out_of_memory, measurement


class LimitTooLowError(Exception):
    """The smallest batch does not fit. If this is so in all precisions, the user gets a `ValueError`."""


class RunFailedError(Exception):
    """Training failed for another reason than memory. If no precision has a size, the user gets a `RuntimeError`."""


@final
class BatchSizeSearch:
    """Trains at one size after the other, until no larger size can fit.

    The module's own size, the limit and the number of rows are the same in all precisions, so they are kept between
    searches. A search begins at the size that the last one found.

    Args:
        runs: Trains at one size.
        limit_gib: The user's limit; `None` takes the free memory of the device.
        shown: Shows the progress.

    """

    def __init__(self, runs: ShortRuns, limit_gib: float | None, shown: Progress) -> None:
        self._runs, self._shown, self._given_gib = runs, shown, limit_gib
        self._begin_with: int | None = None
        self._own_size = 0
        self._limit_gib = math.nan
        self._most_rows: int | None = None

    def run(self, arm: Spec) -> tuple[BatchSizeResult, LimitTooLowError | RunFailedError | None]:
        """Find the largest size in one precision, or the reason why there is none.

        Raises:
            ValueError: If no precision could be measured.

        """
        self._arm = arm
        self._points: list[Measurement] = []
        self._first: tuple[int, Facts] | None = None
        self._last_facts = Facts()
        self._num_runs = 0
        try:
            best, error = self._largest(), None
            self._begin_with = best.batch_size
            lr, message = self._advice(best)
        except (LimitTooLowError, RunFailedError) as why:
            best, error = Measurement(0, math.nan, math.nan), why
            lr, message = None, str(why)
        result = BatchSizeResult(
            *best,
            lr=lr,
            measured=tuple(sorted(self._points)),
            limit_gib=self._limit_gib,
            message=message,
            error=str(error) if error else None,
        )
        return result, error

    def _largest(self) -> Measurement:
        self._measure(self._begin_with)
        while self._num_runs < MOST_RUNS:
            size = next_size(self._points, self._limit_gib, self._most_rows)
            if size is None:
                break
            self._measure(size)
        best = largest_within(self._points, self._limit_gib)
        if best is None:
            raise LimitTooLowError(self._too_low())
        return best

    # -- one size ------------------------------------------------------------------------------------------------------

    def _measure(self, size: int | None) -> None:
        """Train at a size, or at the user's own, and add a point."""
        self._num_runs += 1
        self._shown.start(f"{self._arm.label}, {f'batch size {size:,}' if size else 'its own batch size'}")
        run, facts = self._runs.run(self._arm, size)
        if facts.refused is not None:
            raise ValueError(facts.refused)
        self._own_size = self._own_size or facts.own_size
        tried = size or facts.own_size
        if run.error is None and facts.num_batches == 0:
            if not facts.num_rows or facts.num_rows >= tried:
                raise ValueError(_NO_BATCHES)
            self._most_rows = facts.num_rows  # `drop_last` dropped the only batch
            return self._measure(self._most_rows)
        if run.error is not None and (tried < 1 or not is_out_of_memory(run)):
            raise self._failed(run, tried)
        if math.isnan(self._limit_gib) and facts.device:
            self._limit_gib = self._limit(facts)
        if run.error is None:
            self._require_batches_of_the_size(tried, facts)
            self._last_facts = facts
            tried = self._within_rows(tried, facts)
            if run.peak_memory_bytes is None:
                raise RunFailedError(_NO_PEAK)
        point = measurement(run, facts, tried)
        self._points.append(point)
        held = f"{rounded(point.peak_gib)} GiB" if math.isfinite(point.peak_gib) else "out of memory"
        self._shown.finish(f"{self._arm.label}, batch size {point.batch_size:,}: {held}, {run.total_s:.0f} s")
        return None

    def _limit(self, facts: Facts) -> float:
        limits = [limit for limit in (self._given_gib, facts.device_gib) if limit is not None]
        if not limits:
            raise ValueError(
                f"`memory_limit_gib` must be given: training runs on {facts.device}, which does not say how much memory"
                " it has. Write `memory_limit_gib=4` for 4 GiB."
            )
        return min(limits)

    def _failed(self, run: Run, size: int) -> LimitTooLowError | RunFailedError:
        self._shown.finish(f"{self._arm.label}, batch size {size:,}: failed")
        text = failure(run)
        if self._points and largest_within(self._points, self._limit_gib) is None:  # such as BatchNorm at a single row
            return LimitTooLowError(f"{self._too_low()} A batch of {size:,} failed: {text}")
        at = f" at batch size {size:,}" if size else ""
        if self._points:
            at += f" (it ran at {listed([f'{point.batch_size:,}' for point in sorted(self._points)])})"
        return RunFailedError(f"Training in {self._arm.label} failed{at}: {text}.")

    def _require_batches_of_the_size(self, size: int, facts: Facts) -> None:
        if self._first is None:
            self._first = size, facts
        first_size, first = self._first
        if size == first_size or (self._most_rows is not None and min(size, first_size) >= self._most_rows):
            return
        now, then = (
            f.loader_sizes if f.loader_sizes and None not in f.loader_sizes else f.batch_rows for f in (facts, first)
        )
        if now is not None and now == then:
            rows = facts.batch_rows if facts.batch_rows is not None else max(s for s in facts.loader_sizes if s)
            raise ValueError(
                f"The training batches must change with `batch_size`: it was {first_size:,}, then {size:,}, and a batch"
                f" had {rows:,} rows each time. Write `DataLoader(..., batch_size=self.batch_size)` in"
                " `train_dataloader`, which is called after `batch_size` was set; `__init__` is too early for it."
            )

    def _within_rows(self, size: int, facts: Facts) -> int:
        """Return the batch size that actually ran, and record the number of rows of the data."""
        if facts.num_rows is not None:
            sizes = [s for s in facts.loader_sizes if s is not None]
            self._most_rows = max(1, facts.num_rows * size // max(sizes) if sizes else facts.num_rows)
        elif facts.batch_rows is not None and self._first is not None:
            first_size, first = self._first
            if facts.batch_rows < size and first.batch_rows == first_size < facts.batch_rows:  # a stream that ends
                self._most_rows = facts.batch_rows
        return size if self._most_rows is None else min(size, self._most_rows)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _advice(self, best: Measurement) -> tuple[float | None, str]:
        """Return the learning rate to try, and the message of the result."""
        facts = self._last_facts
        lr, words = suggested_rate(facts.rates, self._own_size, best.batch_size)
        held = f"{rounded(best.peak_gib)} of {rounded(self._limit_gib)} GiB"
        if facts.device == "cpu":
            held += " (size of all tensors)"
        if best.batch_size == self._most_rows:
            text = f"A batch of all {best.batch_size:,} rows holds {held}: the data is the limit, not memory."
        else:
            text = f"A batch of {best.batch_size:,} holds {held}: memory is the limit."
        ran_out = [p.batch_size for p in self._points if not math.isfinite(p.peak_gib)]
        if ran_out:
            text += f" Memory ran out at {min(ran_out):,}."
        together = facts.accumulated * facts.world_size
        if together > 1:
            text += f" An optimizer step sees {together:,} such batches."
        return lr, f"{text} {words}"

    def _too_low(self) -> str:
        smallest = min(self._points)
        peak = f"holds {rounded(smallest.peak_gib)} GiB" if math.isfinite(smallest.peak_gib) else "runs out of memory"
        whose, advice = "The memory of the device", "Make the module smaller."
        if self._given_gib is not None:
            whose, advice = "`memory_limit_gib`", "Raise it, or make the module smaller."
        return (
            f"{whose} must hold the smallest batch; in {self._arm.label} a batch of {smallest.batch_size:,} {peak}, and"
            f" the limit is {rounded(self._limit_gib)} GiB. {advice}"
        )


_NO_BATCHES = "The training data must have batches; `train_dataloader` gives none. Look at its dataset and `drop_last`."
_NO_PEAK = "Memory could not be measured, because another torch profiler was running. Remove it from the module."
