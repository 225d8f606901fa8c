"""The search in one precision: which sizes are run, what is refused, and the words for what was found."""

from __future__ import annotations

import math
from typing import NamedTuple

from typing_extensions import final

from lightning_amp._text import listed, rounded
from lightning_amp.comparison import ArmSpec, Progress
from lightning_amp.tune.batch_size._learning_rate import suggested_rate
from lightning_amp.tune.batch_size._next_size import MOST_RUNS, largest_within, next_size
from lightning_amp.tune.batch_size._probe import Facts
from lightning_amp.tune.batch_size._result import BatchSizeResult, Measurement
from lightning_amp.tune.batch_size._short_runs import ShortRuns, failure, is_out_of_memory, measurement
from lightning_amp.verdicts import ArmRun


class LimitTooLowError(Exception):
    """Not even the smallest batch fits. It becomes a `ValueError`, or the `error` of a result."""


class RunFailedError(Exception):
    """The module could not be trained, not for want of memory. It becomes a `RuntimeError`, or an `error`, too."""


@final
class Found(NamedTuple):
    """What a search ended with, and what it leaves to the next precision: where to begin, and what is the same for all.

    Attributes:
        result: For the user.
        own_size: The module's own batch size.
        limit_gib: What a batch has to fit into; NaN if unknown so far.
        most: Number of rows of the data; `None` if unknown or endless.
        error: Why there is no batch size.

    """

    result: BatchSizeResult
    own_size: int
    limit_gib: float
    most: int | None
    error: LimitTooLowError | RunFailedError | None = None


@final
class BatchSizeSearch:
    """Runs sizes until none could be larger.

    Args:
        runs: Runs one.
        arm: The precision.
        limit_gib: The user's limit; `None`: that of the device.
        shown: Says what goes on.
        before: What another precision left; `None` in the first one.

    """

    def __init__(
        self, runs: ShortRuns, arm: ArmSpec, limit_gib: float | None, shown: Progress, before: Found | None
    ) -> None:
        self._runs, self._arm, self._shown, self._given_gib = runs, arm, shown, limit_gib
        self._begin_with = None if before is None else before.result.batch_size
        self._limit_gib = math.nan if before is None else before.limit_gib
        self._own_size = 0 if before is None else before.own_size
        self._most = None if before is None else before.most
        self._points: list[Measurement] = []
        self._first: tuple[int, Facts] | None = None
        self._last_facts = Facts()
        self._num_runs = 0

    def run(self) -> Found:
        """Find the largest size, or say why there is none in this precision.

        Raises:
            ValueError: If it cannot be measured in any precision.

        """
        try:
            best, error = self._largest(), None
        except (LimitTooLowError, RunFailedError) as why:
            best, error = Measurement(0, math.nan, math.nan), why
        lr, message = (None, str(error)) if error else self._advice(best)
        result = BatchSizeResult(
            *best,
            lr=lr,
            measured=tuple(sorted(self._points)),
            limit_gib=self._limit_gib,
            message=message,
            error=str(error) if error else None,
        )
        return Found(result, self._own_size, self._limit_gib, self._most, error)

    def _largest(self) -> Measurement:
        self._measure(self._begin_with)
        while self._num_runs < MOST_RUNS:
            size = next_size(self._points, self._limit_gib, self._most)
            if size is None:
                break
            self._measure(size)
        best = largest_within(self._points, self._limit_gib)
        if best is None:
            raise LimitTooLowError(self._too_low())
        return best

    # -- one size ------------------------------------------------------------------------------------------------------

    def _measure(self, size: int | None) -> None:
        """Run a size, or the user's own, and keep what came of it."""
        run, facts = self._run(size)
        self._own_size = self._own_size or facts.own_size
        tried = size or facts.own_size
        if run.error is None and facts.num_batches == 0:
            if not facts.num_rows or facts.num_rows >= tried:
                raise ValueError(_NO_BATCHES)
            self._most = facts.num_rows  # `drop_last` leaves none of them
            return self._measure(self._most)
        if run.error is not None and (tried < 1 or not is_out_of_memory(run)):
            raise self._failed(run, tried)
        if math.isnan(self._limit_gib) and facts.device:
            self._limit_gib = _limit(self._given_gib, facts)
        if run.error is None:
            self._refuse_what_does_not_follow(tried, facts)
            self._last_facts = facts
            tried = self._within_rows(tried, facts)
            if run.peak_memory_bytes is None:
                raise RunFailedError(_NO_PEAK)
        point = measurement(run, facts, tried)
        self._points.append(point)
        held = f"{rounded(point.peak_gib)} GiB" if math.isfinite(point.peak_gib) else "out of memory"
        self._shown.finish(f"{self._arm.label}, batch size {point.batch_size:,}: {held}, {run.total_s:.0f} s")
        return None

    def _run(self, size: int | None) -> tuple[ArmRun, Facts]:
        self._num_runs += 1
        which = "its own batch size" if size is None else f"batch size {size:,}"
        self._shown.start(f"{self._arm.label}, {which}")
        run, facts = self._runs.run(self._arm, size)
        if facts.refused is not None:
            raise ValueError(facts.refused)
        return run, facts

    def _failed(self, run: ArmRun, size: int) -> LimitTooLowError | RunFailedError:
        self._shown.finish(f"{self._arm.label}, batch size {size:,}: failed")
        text = failure(run)
        if self._points and largest_within(self._points, self._limit_gib) is None:  # BatchNorm refuses a single row
            return LimitTooLowError(f"{self._too_low()} A batch of {size:,} failed: {text}")
        at = f" at batch size {size:,}" if size else ""
        if self._points:
            at += f" (it ran at {listed([f'{point.batch_size:,}' for point in sorted(self._points)])})"
        return RunFailedError(f"Training in {self._arm.label} failed{at}: {text}.")

    def _refuse_what_does_not_follow(self, size: int, facts: Facts) -> None:
        if self._first is None:
            self._first = size, facts
        first_size, first = self._first
        if size == first_size or (self._most is not None and min(size, first_size) >= self._most):
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
        """Return the size that was really run, and learn how many rows there are."""
        if facts.num_rows is not None:
            sizes = [s for s in facts.loader_sizes if s is not None]
            self._most = max(1, facts.num_rows * size // max(sizes) if sizes else facts.num_rows)
        elif facts.batch_rows is not None and self._first is not None:
            first_size, first = self._first
            if facts.batch_rows < size and first.batch_rows == first_size < facts.batch_rows:  # a stream that ends
                self._most = facts.batch_rows
        return size if self._most is None else min(size, self._most)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _advice(self, best: Measurement) -> tuple[float | None, str]:
        """Return the learning rate to try, and what was found in words."""
        facts = self._last_facts
        lr, words = suggested_rate(facts.rates, self._own_size, best.batch_size)
        held = f"{rounded(best.peak_gib)} of {rounded(self._limit_gib)} GiB"
        if facts.device == "cpu":
            held += " (what tensors hold)"
        if best.batch_size == self._most:
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
        needed = (
            f"holds {rounded(smallest.peak_gib)} GiB" if math.isfinite(smallest.peak_gib) else "is more than there is"
        )
        whose = "`memory_limit_gib`" if self._given_gib is not None else "The memory of the device"
        return (
            f"{whose} must hold the smallest batch; in {self._arm.label} one of {smallest.batch_size:,} {needed}, and"
            f" the limit is {rounded(self._limit_gib)} GiB. Raise it, or make the module smaller."
        )


_NO_BATCHES = "The training data must have batches; `train_dataloader` gives none. Look at its dataset and `drop_last`."
_NO_PEAK = "Memory could not be measured: another profiler of torch was at work. Take it out of the module."


def _limit(given_gib: float | None, facts: Facts) -> float:
    if given_gib is None and facts.device_gib is None:
        raise ValueError(
            f"`memory_limit_gib` must be given: training runs on {facts.device}, which does not say how much memory it"
            " has. Write `memory_limit_gib=4` for 4 GiB."
        )
    return min(limit for limit in (given_gib, facts.device_gib) if limit is not None)
