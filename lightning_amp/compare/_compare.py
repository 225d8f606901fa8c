"""`compare_precisions`: train the same module in several precisions, and judge them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp.compare._comparison import Comparison
from lightning_amp.compare._plan import MeasureSpeed
from lightning_amp.compare._report import PrecisionReport


def compare_precisions(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    precisions: Sequence[Any] | Mapping[str, Any] = ("fp32", "bf16", "fp16"),
    *,
    trainer_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    num_seeds: int = 1,
    margins: Mapping[str, Any] | None = None,
    control: bool | None = None,
    dirpath: str | os.PathLike[str] | None = None,
    executor: Any = None,
    measure_speed: MeasureSpeed = "as run",
) -> PrecisionReport:
    """Train the same module in several precisions, and judge whether a precision is worse and how much it gains.

    .. code-block:: python

        from models import Model, Data  # in a file that another process can import

        if __name__ == "__main__":
            report = compare_precisions(
                Model,
                Data,
                precisions=["fp32", "bf16", "fp16"],
                trainer_kwargs=dict(max_epochs=10),
                num_seeds=3,
                margins={"val_loss": 0.01},
                dirpath="comparison",
            )
            print(report)
            report.to_html("comparison.html")

    Each run does what a user would do by hand: `seed_everything(seed)`, `make_module()`, `make_data()`,
    `Trainer(**trainer_kwargs, plugins=[...]).fit`. It runs in a process of its own, and computes the same values, bit
    for bit. All arms of one seed share initial weights, data order and random draws. They run one after the other,
    unless an executor runs several at once.
    Every second seed runs them in reverse order, so that a machine that becomes slower does not always slow down the
    same arm.

    A verdict compares the final values of a metric with a margin, paired by seed. It is "not worse" if the one-sided
    95 % bound of the mean cost is within the margin, and "worse" if the bound is beyond it. Otherwise the verdict is
    "undecided". The test is corrected for the number of metrics and arms. Fewer than three seeds never decide. The
    control is the reference with its initial weights moved in their last bit: it shows the run-to-run noise, and how
    busy the machine was.

    A speed is the median ratio of the times of the same steps, seed by seed, with a 95 % interval over the seeds. If
    either arm may be the faster one, it is printed as "speed undecided". Runs that shared a device, or had devices of
    different models, are not compared in speed.

    With an executor, a run whose worker dies is repeated once; if that is lost as well, it has failed. The report says
    so. Each worker needs the same versions of this package, torch, Lightning and Python.

    Args:
        make_module: Returns a new LightningModule: its class, or a function without arguments. Another process imports
            it, so define it at the top level of a file. The file may be the script, if that has a `__main__` guard.
        make_data: Returns a new LightningDataModule, in the same way.
        precisions: Names, or a mapping from labels to names, plugins, or arguments of :class:`AmpPrecision`:
            `{"fp32": "fp32", "fp16, head in fp32": dict(precision="fp16", fp32_modules=["head"])}`. The first is the
            reference.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. Logs and checkpoints go into
            `dirpath`, or are not kept, unless `default_root_dir` names another place.
        seed: The first seed.
        num_seeds: Number of seeds: `seed`, `seed + 1`, and so on.
        margins: The cost that a precision may have, by metric and in its own unit: `{"val_acc": 0.002}`. The better
            direction is known from torchmetrics or from the name. If it is not, write `{"val_thing": ("min", 0.1)}`.
        control: Whether to run the control; `None`: with more than one seed.
        dirpath: Folder in which finished runs are kept, or its URL. A second call with the same arguments, or with more
            seeds or precisions, runs only the missing ones. `None` keeps nothing.
        executor: Trains several runs at once: :class:`LocalDevices`, or any object with `submit(fn, /, *args)` whose
            result has `done()` and `result()`. Executors of `concurrent.futures`, Dask (`client.get_executor()`),
            submitit, executorlib and Parsl are such. A lambda or a function of a notebook is sent with cloudpickle.
            `None`: one run after the other.
        measure_speed: `"as run"`: compare the times of the runs that had their device for themselves. `"alone"`: train
            all arms for some steps more, one after the other on one device, and compare these times. `False`: do not
            compare speeds.

    Returns:
        The report. The folder also keeps failed runs, with their errors.

    Raises:
        ValueError: If an argument is wrong, before anything runs if that can be known. If a margin is for a metric
            that the first finished run did not log. If `dirpath` has another comparison.
        RuntimeError: If it is called on several ranks, or by a file that is imported in the process of an arm. If
            workers of the executor have other packages, or it takes no runs.
        OSError: If `dirpath` cannot be written.
        ModuleNotFoundError: With more than one seed and without scipy (`pip install scipy`). With an executor and
            factories that have no importable name, and without cloudpickle.
        KeyboardInterrupt: If it is interrupted; finished runs stay in `dirpath`.

    Cost: all runs, and about a second to start each on Linux; the first start takes some seconds. After each run the
    final weights are validated once more, by :class:`MetricComparison`, and one training step runs again to count its
    FLOPs. The reported training time includes neither of them.

    """
    comparison = Comparison(
        make_module,
        make_data,
        precisions,
        trainer_kwargs=trainer_kwargs,
        seed=seed,
        num_seeds=num_seeds,
        margins=margins,
        control=control,
        dirpath=dirpath,
        executor=executor,
        measure_speed=measure_speed,
    )
    return comparison.run()
