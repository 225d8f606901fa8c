"""`find_batch_size`: find the largest batch that fits, by short runs in processes of their own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp._arguments import is_number, require
from lightning_amp._compat._names import LightningDataModule, LightningModule
from lightning_amp._text import listed, memory
from lightning_amp.compare import (
    HERE,
    Progress,
    Run,
    Spec,
    check_factory,
    check_place,
    check_trainer_kwargs,
    parse_arms,
)
from lightning_amp.shadow import device_of_trainer
from lightning_amp.tune._batch_size_run import (
    NOT_OF_THE_BATCH_GIB,
    Facts,
    is_out_of_memory,
    measurement,
    run_once,
    why_failed,
)
from lightning_amp.tune._batch_sizes import (
    MOST_RUNS,
    BatchSizeResult,
    BatchSizes,
    Measurement,
    largest_within,
    next_size,
    suggested_rate,
)

RunOnce = Callable[[Spec, int | None], tuple[Run, Facts]]


def find_batch_size(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    precisions: Sequence[Any] | Mapping[str, Any] = ("fp32", "bf16"),
    *,
    memory_limit_gib: float | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
) -> BatchSizes:
    """Find the largest batch that fits into memory, in each precision.

    .. code-block:: python

        from models import Data, Model

        found = find_batch_size(Model, Data, precisions=["fp32", "bf16"], memory_limit_gib=0.5)
        print(found)
        data = Data()
        data.batch_size = found["bf16"].batch_size

    Each run trains the module for some steps, in a process of its own and without validation. The first two runs use
    the module's own batch size and twice that size; a line through their two memory peaks predicts the third run's
    size. If that size exceeds the limit, or the line was not straight, the search goes on between the sizes that it
    knows, for ten runs at most. The returned size was run, and its run was within the limit. A size of 64 or more is
    rounded down to a multiple of 8, because tensor cores are fast with such multiples. It never exceeds the number of
    rows.

    As Lightning's own finder does, it sets the attribute `batch_size`, or `hparams.batch_size`, of the data module and
    of the module, wherever it exists. It is set before the loaders are made, which have to use it.
    It is the size of one batch on one device: an optimizer step sees it times `accumulate_grad_batches` times the
    devices.

    On a GPU, memory is the most that its allocator handed out. On a CPU it is the most that tensors held. On Linux the
    growth of the process counts if it is more: from the making of the module on, less 0.125 GiB for libraries and this
    measurement. It is measured on the batches of the run: if their size varies (sequences padded to the longest),
    leave room.

    Args:
        make_module: Returns a new LightningModule: its class, or a function without arguments. It travels by value.
        make_data: Returns a new LightningDataModule, likewise; `LightningDataModule` itself if the module has the
            loaders.
        precisions: Names, or a mapping from labels to names, plugins, or arguments of :class:`AmpPrecision`, as
            :func:`compare_precisions` takes them.
        memory_limit_gib: Limit in GiB (2**30 bytes) for each device. `None`: the free memory of the device. On the CPU
            it has to be given, because its memory has no such limit.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. Arguments that say how long to
            train or what to write are ignored, and so are loggers and callbacks that stop or write.

    Returns:
        A mapping from label to :class:`~lightning_amp.tune.BatchSizeResult`: `.batch_size`, `.peak_gib`,
        `.samples_per_s`, `.lr` (a learning rate to try: linear for SGD, square root for Adam), `.measured`, `.message`.
        If a precision fails while another one works, it has an `.error` and a `batch_size` of 0.

    Raises:
        ValueError: If an argument is wrong, or nothing has a `batch_size`, or batches do not change with it. If there
            are no batches, or not even one row fits in any precision.
        RuntimeError: If no precision could be trained, with the module's own error and its line. If it is called on
            several ranks, or in the process of a run.

    Cost: three or four runs for each precision, each of at least nine steps. The first start takes some seconds, on
    Linux each later one about a second. If memory grows faster than the batch (a loss over all pairs of rows), a run
    may hold several times the limit; on the CPU nothing stops it.

    """
    check_place("find_batch_size")
    check_factory("make_module", make_module, LightningModule)
    check_factory("make_data", make_data, LightningDataModule)
    kwargs = check_trainer_kwargs(trainer_kwargs)
    arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
    fine = memory_limit_gib is None or (is_number(memory_limit_gib) and memory_limit_gib > 0)
    none = "or `None` for what the device has"
    require(fine, "memory_limit_gib", "a number above 0, in GiB", memory_limit_gib, none=none)
    if memory_limit_gib is None and device_of_trainer(kwargs).type == "cpu":
        raise ValueError(_NO_LIMIT.format(why="on the CPU, whose memory has no limit of its own"))
    results, errors = BatchSizes(), list[Exception]()
    with (
        tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as folder,
        Progress(3 * len(arms)) as shown,
        closing(HERE),
    ):

        def run(arm: Spec, size: int | None) -> tuple[Run, Facts]:
            return run_once(arm, (make_module, make_data), size, kwargs, Path(tempfile.mkdtemp(dir=folder)), shown.tick)

        for label, arm in arms.items():
            search = Search(run, arm, memory_limit_gib, shown)
            try:
                results[label] = search.result()
            except (LimitTooLowError, RunFailedError) as error:
                errors.append(error)
                text = str(error)
                results[label] = BatchSizeResult(0, math.nan, math.nan, None, text, tuple(search.points), text)
    if len(errors) == len(arms):
        text = " ".join(dict.fromkeys(map(str, errors)))
        fits_nowhere = all(isinstance(error, LimitTooLowError) for error in errors)
        raise ValueError(text) if fits_nowhere else RuntimeError(text)
    return results


class LimitTooLowError(Exception):
    """The smallest batch does not fit. If this is so in all precisions, the user gets a `ValueError`."""


class RunFailedError(Exception):
    """Training failed for another reason than memory. If no precision has a size, the user gets a `RuntimeError`."""


@final
class Search:
    """Trains at one size after the other in one precision, until no larger size can fit.

    Args:
        run: Trains once, at a size or at the module's own.
        arm: The precision.
        limit_gib: The user's limit; `None` takes the free memory of the device.
        shown: Shows the progress.

    """

    def __init__(self, run: RunOnce, arm: Spec, limit_gib: float | None, shown: Progress) -> None:
        self._run, self._arm, self._shown = run, arm, shown
        self._given_gib, self._limit_gib = limit_gib, math.nan
        self._facts: dict[int, Facts] = {}
        self._most = math.inf
        self.points: list[Measurement] = []

    def result(self) -> BatchSizeResult:
        """Find the largest size.

        Raises:
            LimitTooLowError, RunFailedError: If there is none.
            ValueError: If no precision could be measured.

        """
        own_size = self._measure(None)
        while len(self.points) < MOST_RUNS:
            size = next_size(self.points, self._limit_gib, self._most)
            if size is None:
                break
            self._measure(size)
        best = largest_within(self.points, self._limit_gib)
        if best is None:
            raise LimitTooLowError(self._too_low())
        lr, words = suggested_rate(self._facts[best.batch_size].rates, own_size, best.batch_size)
        return BatchSizeResult(*best, lr, f"{self._describe(best)} {words}", tuple(sorted(self.points)))

    def _measure(self, size: int | None) -> int:
        """Train at a size, or at the user's own, add a point, and return the module's own size."""
        name = f"{self._arm.label}, {f'batch size {size:,}' if size else 'its own batch size'}"
        self._shown.set_description(name)
        run, facts = self._run(self._arm, size)
        if facts.refused:
            raise ValueError(facts.refused)
        tried = size or facts.own_size
        if run.error is None and not facts.num_batches:
            raise ValueError(_NO_BATCHES)
        if run.error is not None and (not tried or not is_out_of_memory(run)):
            self._shown.finish(f"{name}: failed")
            raise self._failed(why_failed(run), tried)
        if math.isnan(self._limit_gib) and facts.device:
            limits = [limit for limit in (self._given_gib, facts.device_gib) if limit is not None]
            if not limits:
                raise ValueError(_NO_LIMIT.format(why=f"on {facts.device}, which does not say how much memory it has"))
            self._limit_gib = min(limits)
        rows = tried if run.error is not None else self._rows(tried, facts)
        point = measurement(run, facts, rows)
        self.points.append(point)
        held = memory(point.peak_gib * 2**30) if math.isfinite(point.peak_gib) else "out of memory"
        self._shown.finish(f"{self._arm.label}, batch size {rows:,}: {held}, {run.total_s:.0f} s")
        return facts.own_size

    def _rows(self, size: int, facts: Facts) -> int:
        """Return the size that really ran, and note where the data ends.

        Raises:
            ValueError: If batches do not change with the size.

        """
        follows = any(before.rows == other for other, before in self._facts.items())
        if facts.num_rows is None and facts.rows < size and follows:
            self._most = facts.rows  # a stream that ends
        elif facts.num_rows is not None:
            self._most = max(1, facts.num_rows * size // max(facts.rows, 1)) if facts.rows else facts.num_rows
        for other, before in self._facts.items():
            if before.rows == facts.rows and min(size, other) < self._most:
                raise ValueError(_FIXED.format(other=other, size=size, rows=facts.rows))
        rows = int(min(size, self._most))
        self._facts[rows] = facts
        return rows

    # -- words ---------------------------------------------------------------------------------------------------------

    def _describe(self, best: Measurement) -> str:
        facts = self._facts[best.batch_size]
        held = f"{memory(best.peak_gib * 2**30)} of {memory(self._limit_gib * 2**30)}"
        if facts.device == "cpu":
            is_process = facts.process_gib > 0 and best.peak_gib == facts.process_gib - NOT_OF_THE_BATCH_GIB
            held += f" ({'growth of the process' if is_process else 'size of all tensors'})"
        ends = best.batch_size == self._most
        which = f"all {best.batch_size:,} rows" if ends else f"{best.batch_size:,}"
        why = "the data is the limit, not memory" if ends else "memory is the limit"
        ran_out = [point.batch_size for point in self.points if not math.isfinite(point.peak_gib)]
        more = f" Memory ran out at {min(ran_out):,}." if ran_out else ""
        more += f" An optimizer step sees {facts.per_step:,} such batches." if facts.per_step > 1 else ""
        return f"A batch of {which} holds {held}: {why}.{more}"

    def _failed(self, why: str, size: int) -> LimitTooLowError | RunFailedError:
        if self.points and largest_within(self.points, self._limit_gib) is None:  # such as BatchNorm at a single row
            return LimitTooLowError(f"{self._too_low()} A batch of {size:,} failed: {why}.")
        ran = listed([f"{point.batch_size:,}" for point in sorted(self.points)])
        at = (f" at batch size {size:,}" if size else "") + (f" (it ran at {ran})" if ran else "")
        return RunFailedError(f"Training in {self._arm.label} failed{at}: {why}.")

    def _too_low(self) -> str:
        least = min(self.points)
        peak = f"holds {memory(least.peak_gib * 2**30)}" if math.isfinite(least.peak_gib) else "runs out of memory"
        limit = "The memory of the device" if self._given_gib is None else "`memory_limit_gib`"
        return (
            f"{limit} must hold the smallest batch; in {self._arm.label} a batch of {least.batch_size:,} {peak}, and"
            f" the limit is {memory(self._limit_gib * 2**30)}. Raise it, or make the module smaller."
        )


_NO_BATCHES = (
    "The training data must have batches; `train_dataloader` gives none. Look at its dataset, and at `drop_last`, which"
    " drops the only batch if there are fewer rows than `batch_size`."
)
_NO_LIMIT = "`memory_limit_gib` must be given {why}: write `memory_limit_gib=4` for 4 GiB."
_FIXED = (
    "The training batches must change with `batch_size`: it was {other:,}, then {size:,}, and a batch had {rows:,} rows"
    " each time. Write `DataLoader(..., batch_size=self.batch_size)` in `train_dataloader`, which is called after"
    " `batch_size` was set; `__init__` is too early for it."
)
