"""`find_batch_size`: find the largest batch that fits, by short runs in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp._arguments import is_number, require
from lightning_amp.compare import (
    HERE,
    check_factory,
    check_place,
    check_trainer_kwargs,
    parse_arms,
    progress,
)
from lightning_amp.shadow import device_of_trainer
from lightning_amp.tune.batch_size._batch_size_search import BatchSizeSearch, LimitTooLowError
from lightning_amp.tune.batch_size._result import BatchSizeResult, BatchSizes
from lightning_amp.tune.batch_size._short_runs import ShortRuns

_USUAL_RUNS = 3


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

        found = find_batch_size(Model, Data, precisions=["fp32", "bf16"], memory_limit_gib=0.5)
        print(found)
        data = Data()
        data.batch_size = found["bf16"].batch_size

    Each run trains the module for some steps, in a process of its own and without validation. The first two runs use
    the module's own batch size and another one; a line through their two memory peaks predicts the third run's size.
    If that size exceeds the limit, or the line was not straight, the search goes on. It ends when at most one percent
    can be gained, or after ten runs in a precision. The returned size was run, and its run was within the limit. A size
    of 64 or more is rounded down to a multiple of 8, because tensor cores are fast with such multiples; this costs an
    eighth at most. It never exceeds the number of rows.

    As Lightning's own finder does, it sets the attribute `batch_size`, or `hparams.batch_size`, of the data module and
    of the module, wherever it exists. It is set before `setup` and before the loaders are made, which
    have to use it. It is the size of one batch on one device: an optimizer step sees it times `accumulate_grad_batches`
    times the devices.

    Memory is the most that training holds at once: on a GPU the count of its allocator, on the CPU the size of all
    tensors. It is measured on the batches of the run: if their size varies (sequences padded to the longest), leave
    room.

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
            several ranks, or by a file that is imported in the process of a run.

    Cost: three or four runs for each precision, each of at least nine steps. The first start takes some seconds, on
    Linux each later one about a second. If memory grows faster than the batch (a loss over all pairs of rows), a run
    may hold several times the limit; on the CPU nothing stops it.

    """
    check_place("find_batch_size")
    check_factory("make_module", make_module, LightningModule)
    check_factory("make_data", make_data, LightningDataModule)
    kwargs = check_trainer_kwargs(trainer_kwargs)
    arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
    _check_limit(memory_limit_gib, kwargs)
    results: dict[str, BatchSizeResult] = {}
    errors: list[Exception] = []
    with (
        tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as folder,
        progress(_USUAL_RUNS * len(arms)) as shown,
        HERE.forking(),
    ):
        runs = ShortRuns(make_module, make_data, kwargs, Path(folder), shown.move)
        search = BatchSizeSearch(runs, memory_limit_gib, shown)
        for number, (label, arm) in enumerate(arms.items(), 1):
            results[label], error = search.run(arm)
            if error is not None:
                errors.append(error)
            shown.expect(runs.num_runs + _USUAL_RUNS * (len(arms) - number))
    if len(errors) == len(arms):
        text = " ".join(dict.fromkeys(map(str, errors)))
        fits_nowhere = all(isinstance(error, LimitTooLowError) for error in errors)
        raise ValueError(text) if fits_nowhere else RuntimeError(text)
    return BatchSizes(results)


def _check_limit(limit_gib: object, trainer_kwargs: Mapping[str, Any]) -> None:
    fine = limit_gib is None or (is_number(limit_gib) and float(limit_gib) > 0)  # type: ignore[arg-type]
    require(fine, "memory_limit_gib", "a number above 0, in GiB", limit_gib, none="or `None` for what the device has")
    if limit_gib is None and device_of_trainer(trainer_kwargs).type == "cpu":
        raise ValueError(
            "`memory_limit_gib` must be given on the CPU, whose memory has no limit of its own: write"
            " `memory_limit_gib=4` for tensors of 4 GiB."
        )
