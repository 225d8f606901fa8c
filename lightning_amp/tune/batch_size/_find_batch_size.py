"""`find_batch_size`: the largest batch that fits, by a line through what was measured, and a run that proves it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp._arguments import is_number, require
from lightning_amp.compare import check_factory, check_place, check_trainer_kwargs, parse_arms, progress
from lightning_amp.shadow import device_of_trainer
from lightning_amp.tune.batch_size._batch_size_search import BatchSizeSearch, Found, LimitTooLowError
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

        from models import Model, Data  # in a file that another process can import

        if __name__ == "__main__":
            found = find_batch_size(Model, Data, precisions=["fp32", "bf16"], memory_limit_gib=0.5)
            print(found)
            data = Data()
            data.batch_size = found["bf16"].batch_size

    The module is trained for some steps at its own batch size and at another one, each time in a fresh process and
    without validation; a line through the two peaks leads to the size that is run next. If that one is beyond the
    limit, or the line was not straight, it goes on from there, at most ten runs for a precision, until no more than
    one percent is to be gained. What is returned was run, and was within the limit. From 64 rows on it is rounded down
    to a multiple of 8, which tensor cores are fast with and which costs an eighth at most; never beyond the number of
    rows.

    The size is set as Lightning's own finder sets it: the attribute `batch_size`, or `hparams.batch_size`, of the data
    module and of the module, whichever there are; before `setup` and the loaders, which have to use it. It is the size
    of one batch on one device: what an optimizer step sees is that times `accumulate_grad_batches` times the devices.

    Memory is what training holds at once: on a GPU what its allocator counts itself, on the CPU what tensors hold. It
    is that of the batches that were drawn: where their size varies (sequences padded to the longest), leave room.

    Args:
        make_module: Returns a new LightningModule: its class, or a function without arguments. Another process has to
            import it: a function at the top level of a file, a script's own too if it has a `__main__` guard.
        make_data: Likewise for a LightningDataModule; `LightningDataModule` itself if the module has the loaders.
        precisions: Names, or a mapping from labels to names, plugins, or arguments of :class:`AmpPrecision`, as
            :func:`compare_precisions` takes them.
        memory_limit_gib: Limit in GiB (2**30 bytes) for each device. `None`: what the device has free; on the CPU,
            where memory has no such limit, it has to be given.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. What says how long to train, or
            what to write, is left out, and so are callbacks that stop or write, and loggers.

    Returns:
        A mapping from label to :class:`~lightning_amp.tune.BatchSizeResult`: `.batch_size`, `.peak_gib`,
        `.samples_per_s`, `.lr` (a learning rate to try: linear for SGD, square root for Adam), `.measured`, `.message`.
        A precision that fails while another does not has an `.error` and a `batch_size` of 0.

    Raises:
        ValueError: If an argument is wrong; if nothing has a `batch_size`, or batches do not change with it; if there
            are no batches; if not even one row fits, in any precision.
        RuntimeError: If no precision could be trained, with the module's own error and its line; if it is called on
            several ranks, or by a file that is imported in the process of a run.

    Cost: three or four runs for each precision, each some seconds to start and at least nine steps. Where memory bends
    upwards (a loss over all pairs of rows), a run may hold several times the limit on the CPU, which nothing stops.

    """
    check_place("find_batch_size")
    check_factory("make_module", make_module, LightningModule)
    check_factory("make_data", make_data, LightningDataModule)
    kwargs = check_trainer_kwargs(trainer_kwargs)
    arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
    _check_limit(memory_limit_gib, kwargs)
    results: dict[str, BatchSizeResult] = {}
    errors: list[Exception] = []
    before: Found | None = None
    with (
        tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as folder,
        progress(_USUAL_RUNS * len(arms)) as shown,
    ):
        runs = ShortRuns(make_module, make_data, kwargs, Path(folder), shown.move)
        for number, (label, arm) in enumerate(arms.items(), 1):
            found = BatchSizeSearch(runs, arm, memory_limit_gib, shown, before).run()
            results[label] = found.result
            if found.error is None:
                before = found
            else:
                errors.append(found.error)
            shown.expect(runs.num_runs + _USUAL_RUNS * (len(arms) - number))
    if len(errors) == len(arms):
        raise _of_all(errors)
    return BatchSizes(results)


def _check_limit(limit_gib: object, trainer_kwargs: Mapping[str, Any]) -> None:
    fine = limit_gib is None or (is_number(limit_gib) and float(limit_gib) > 0)  # type: ignore[arg-type]
    require(fine, "memory_limit_gib", "a number above 0, in GiB", limit_gib, none="or `None` for what the device has")
    if limit_gib is None and device_of_trainer(trainer_kwargs).type == "cpu":
        raise ValueError(
            "`memory_limit_gib` must be given on the CPU, whose memory has no limit of its own: write"
            " `memory_limit_gib=4` for tensors of 4 GiB."
        )


def _of_all(errors: Sequence[Exception]) -> Exception:
    """Return what to raise where no precision has a batch size."""
    text = " ".join(dict.fromkeys(str(error) for error in errors))
    return ValueError(text) if all(isinstance(error, LimitTooLowError) for error in errors) else RuntimeError(text)
