"""`compare_precisions`: train the same module in several precisions, fairly, and judge."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp.compare._arms import ArmSpec, parse_arms
from lightning_amp.compare._checks import (
    check_margins,
    check_place,
    check_seeds,
    check_trainer_kwargs,
    parse_margins,
)
from lightning_amp.compare._describe import describe, short, without_text
from lightning_amp.compare._factories import check_factory, factory_name
from lightning_amp.compare._plan import Plan
from lightning_amp.compare._process import run_in_process
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
    """Train the same module in several precisions, and judge whether a precision is worse, and what it gains.

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

    Each run is what one would do by hand: `seed_everything(seed)`, `make_module()`, `make_data()`,
    `Trainer(**trainer_kwargs, plugins=[...]).fit`, in a process of its own, and has the values of that run, bit for
    bit. All arms of one seed share initial weights, data order and random draws, and run one after the other; every
    second seed runs them in reverse order, so that a machine that becomes slower does not always meet the same arm.

    A verdict compares the final values of a metric, paired by seed, with a margin: "not worse" where the one-sided
    95 % bound of the mean cost is within it, "worse" where the bound is beyond, else "undecided"; corrected for the
    number of metrics and arms. Fewer than three seeds never decide. The control, the reference with weights moved in
    their last bit, shows the least that two runs of the reference differ by, and how busy the machine was.

    A speed is the median ratio of the times of the same steps, seed by seed, with a 95 % interval over the seeds; an
    interval that leaves it open which arm is faster is printed as "speed undecided".

    Args:
        make_module: Returns a new LightningModule: its class, or a function without arguments. Another process has to
            import it: a function at the top level of a file, a script's own too if it has a `__main__` guard.
        make_data: Likewise for a LightningDataModule.
        precisions: Names, or a mapping from labels to names, plugins, or arguments of :class:`AmpPrecision`:
            `{"fp32": "fp32", "fp16, head in fp32": dict(precision="fp16", fp32_modules=["head"])}`. The first is the
            reference.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. What a run writes (logs,
            checkpoints) goes into `dirpath`, or nowhere, unless `default_root_dir` says where.
        seed: The first seed.
        num_seeds: How many; `seed`, `seed + 1`, and so on.
        margins: What a precision may cost, by metric and in its own unit: `{"val_acc": 0.002}`. Which way is better is
            known from torchmetrics or from the name; else write `{"val_thing": ("min", 0.1)}`.
        control: Whether to run the control; `None`: with more than one seed.
        dirpath: Folder, or its URL, in which finished runs are kept: a second call with the same arguments, or with
            more seeds, runs only what is missing. `None` keeps nothing.

    Returns:
        What was found. A run that failed is in it, with its error.

    Raises:
        ValueError: If an argument is wrong, before anything runs where that can be known; if a margin is for a metric
            that the first finished run did not log; if `dirpath` has another comparison.
        RuntimeError: If it is called on several ranks, or by a file that is imported in the process of an arm.
        OSError: If `dirpath` cannot be written.
        ModuleNotFoundError: With more than one seed and without scipy (`pip install scipy`).
        KeyboardInterrupt: If it is interrupted; what finished stays in `dirpath`.

    Cost: all runs, one after the other, and some seconds to start each. After each the final weights are validated once
    more, by :class:`MetricComparison`, and one training step runs again to count its FLOPs; neither counts as training.

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
        trainer_kwargs={name: short(describe(value)) for name, value in kwargs.items()},
        seed=seed,
        num_seeds=num_seeds,
        control=num_seeds > 1 if control is None else control,
        margins=parsed_margins,
    )
    store = None if dirpath is None else Store(dirpath, _identity(plan, kwargs))
    if store is not None:
        sources = [arm.source for arm in arms.values()]
        store.refuse_reuse(without_text([make_module, make_data, sources, kwargs]))
    with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as folder:
        trainings = _Trainings(plan, arms, make_module, make_data, kwargs, store, Path(folder))
        return PrecisionReport(plan, trainings.run_all())


def _identity(plan: Plan, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes it this comparison: seeds and margins may be others the next time."""
    return {
        "make_module": plan.make_module,
        "make_data": plan.make_data,
        "precisions": [f"{label}: {description}" for label, description in plan.arms.items()],
        "trainer_kwargs": {name: describe(kwargs[name]) for name in sorted(kwargs)},
    }


@final
@dataclass(frozen=True)
class _Trainings:
    """All runs of a plan, one after the other; what is kept in the store is not run again."""

    plan: Plan
    arms: Mapping[str, ArmSpec]
    make_module: Any
    make_data: Any
    trainer_kwargs: Mapping[str, Any]
    store: Store | None
    folder: Path

    def run_all(self) -> list[ArmRun]:
        plan, store, runs = self.plan, self.store, list[ArmRun]()
        finished = 0
        with progress(len(plan.labels) * plan.num_seeds) as shown:
            for label, seed in plan.runs():
                shown.start(f"{label}, seed {seed}")
                kept = None if store is None else store.load(label, seed)
                run = kept or self._run(label, seed, shown.move)
                if store is not None and kept is None:
                    store.save(run)
                shown.finish(f"{label}, seed {seed}: {_ending(run, kept is not None)}", fresh=kept is None)
                runs.append(run)
                finished += run.finished
                if run.finished and finished == 1:
                    check_margins(plan.margins, run)
        return runs

    def _run(self, label: str, seed: int, on_progress: Callable[[float | None, str], None]) -> ArmRun:
        folder, is_control = self.folder / file_name(label, seed), label not in self.arms
        kept_there = None if self.store is None else self.store.work_folder(label, seed)
        task = Task(
            label=label,
            seed=seed,
            arm=self.arms[self.plan.reference if is_control else label],
            moved=is_control,
            make_module=self.make_module,
            make_data=self.make_data,
            trainer_kwargs=self.trainer_kwargs,
            work_folder=str((kept_there or folder).absolute()),
        )
        try:
            return run_in_process(task, on_progress)
        finally:  # checkpoints of all runs together may be more than there is room for
            shutil.rmtree(folder, ignore_errors=True)


def _ending(run: ArmRun, kept: bool) -> str:
    if kept:
        return "kept from before"
    error = " ".join((run.error or "").split())
    cut = error if len(error) <= 160 else f"{error[:160]}..."
    return f"{run.total_s:.0f} s" if run.finished else f"failed: {cut}"
