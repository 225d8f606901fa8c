"""`compare_precisions`: train the same module in several precisions, and judge them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp.compare._arms import parse_arms
from lightning_amp.compare._checks import (
    check_margins,
    check_place,
    check_seeds,
    check_trainer_kwargs,
    parse_margins,
)
from lightning_amp.compare._describe import identity, shown, without_identity
from lightning_amp.compare._factories import check_factory, factory_name
from lightning_amp.compare._plan import Plan
from lightning_amp.compare._process import OnProgress, run_in_process
from lightning_amp.compare._progress import progress
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._statistics import scipy_special
from lightning_amp.compare._store import Store, file_name
from lightning_amp.compare._worker import Task


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
    for bit. All arms of one seed share initial weights, data order and random draws. They run one after the other.
    Every second seed runs them in reverse order, so that a machine that becomes slower does not always slow down the
    same arm.

    A verdict compares the final values of a metric with a margin, paired by seed. It is "not worse" if the one-sided
    95 % bound of the mean cost is within the margin, and "worse" if the bound is beyond it. Otherwise the verdict is
    "undecided". The test is corrected for the number of metrics and arms. Fewer than three seeds never decide. The
    control is the reference with its initial weights moved in their last bit: it shows the run-to-run noise, and how
    busy the machine was.

    A speed is the median ratio of the times of the same steps, seed by seed, with a 95 % interval over the seeds. If
    either arm may be the faster one, it is printed as "speed undecided".

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
            seeds, runs only the missing ones. `None` keeps nothing.

    Returns:
        The report. The folder also keeps failed runs, with their errors.

    Raises:
        ValueError: If an argument is wrong, before anything runs if that can be known. If a margin is for a metric
            that the first finished run did not log. If `dirpath` has another comparison.
        RuntimeError: If it is called on several ranks, or by a file that is imported in the process of an arm.
        OSError: If `dirpath` cannot be written.
        ModuleNotFoundError: With more than one seed and without scipy (`pip install scipy`).
        KeyboardInterrupt: If it is interrupted; finished runs stay in `dirpath`.

    Cost: all runs, one after the other, and some seconds to start each. After each run the final weights are validated
    once more, by :class:`MetricComparison`, and one training step runs again to count its FLOPs. The reported training
    time includes neither of them.

    """
    check_place("compare_precisions")
    check_factory("make_module", make_module, LightningModule)
    check_factory("make_data", make_data, LightningDataModule)
    kwargs = check_trainer_kwargs(trainer_kwargs)
    arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
    check_seeds(seed, num_seeds, control)
    parsed_margins = parse_margins(margins)
    if num_seeds > 1:
        scipy_special()
    plan = Plan(
        make_module=factory_name(make_module),
        make_data=factory_name(make_data),
        arms={label: arm.description for label, arm in arms.items()},
        trainer_kwargs={name: shown(value) for name, value in kwargs.items()},
        seed=seed,
        num_seeds=num_seeds,
        control=num_seeds > 1 if control is None else control,
        margins=parsed_margins,
    )
    store = None
    if dirpath is not None:
        sources = {label: arm.source for label, arm in arms.items()}
        settings = {  # a later call may have other seeds and margins
            "make_module": identity(make_module),
            "make_data": identity(make_data),
            "precisions": [f"{label}: {identity(source)}" for label, source in sources.items()],
            "trainer_kwargs": {name: identity(kwargs[name]) for name in sorted(kwargs)},
        }
        store = Store(dirpath, settings, without_identity([make_module, make_data, sources, kwargs]))
    with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as folder:

        def train(label: str, seed: int, on_progress: OnProgress) -> ArmRun:
            scratch = Path(folder) / file_name(label, seed)
            kept = None if store is None else store.work_folder(label, seed)
            task = Task(
                label=label,
                seed=seed,
                arm=arms.get(label, arms[plan.reference]),
                moved=label not in arms,
                make_module=make_module,
                make_data=make_data,
                trainer_kwargs=kwargs,
                work_folder=str((kept or scratch).absolute()),
            )
            try:
                return run_in_process(task, on_progress)
            finally:  # the checkpoints of all runs together may be larger than the disk
                shutil.rmtree(scratch, ignore_errors=True)

        return PrecisionReport(plan, _run_all(plan, train, store))


def _run_all(plan: Plan, train: Callable[[str, int, OnProgress], ArmRun], store: Store | None) -> list[ArmRun]:
    """Return the runs of a plan, one after the other: from the store, or trained."""
    runs: list[ArmRun] = []
    with progress(len(plan.labels) * plan.num_seeds) as shown:
        for label, seed in plan.runs():
            shown.start(f"{label}, seed {seed}")
            kept = None if store is None else store.load(label, seed)
            run = kept or train(label, seed, shown.move)
            if store is not None and kept is None:
                store.save(run)
            shown.finish(f"{label}, seed {seed}: {_ending(run, kept is not None)}")
            if run.finished and not any(other.finished for other in runs):
                check_margins(plan.margins, run)
            runs.append(run)
    return runs


def _ending(run: ArmRun, kept: bool) -> str:
    if kept:
        return "kept from before"
    error = " ".join((run.error or "").split())
    cut = error if len(error) <= 160 else f"{error[:160]}..."
    return f"{run.total_s:.0f} s" if run.finished else f"failed: {cut}"
