"""`compare_precisions`: train the same module in several precisions, and judge them.

One arm takes this path: `Spec` (`_spec.py`) -> a process (`_process.py`, `_child.py`) -> training (`_train.py`) ->
`Run` (`_run.py`), which `Store` keeps -> `PrecisionReport` (`_report.py`) -> `Verdict` (`_stats.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from typing_extensions import final

from lightning_amp._arguments import require, require_count
from lightning_amp._compat._names import LightningDataModule, LightningModule
from lightning_amp._text import literal
from lightning_amp.compare._checks import (
    check_place,
    check_trainer_kwargs,
    parse_margins,
    wrong_margin,
)
from lightning_amp.compare._describe import Identity, factory_name
from lightning_amp.compare._local_devices import LocalDevices
from lightning_amp.compare._process import HERE, run_in_process, run_on
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import CONTROL, Plan, Run
from lightning_amp.compare._spec import Spec, check_factory, parse_arms
from lightning_amp.compare._stats import scipy_special
from lightning_amp.compare._store import Store, file_name


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
) -> PrecisionReport:
    """Train the same module in several precisions, and judge whether a precision is worse and how much it gains.

    .. code-block:: python

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
    unless an executor runs several at once. Every second seed runs them in reverse order, so that a machine that
    becomes slower does not always slow down the same arm.

    A verdict compares the final values of a metric with a margin, paired by seed. It is "not worse" if the one-sided
    95 % bound of the mean cost is within the margin, and "worse" if the bound is beyond it. Otherwise the verdict is
    "undecided". The test is corrected for the number of metrics and arms. Fewer than three seeds never decide. The
    spread of a metric is at least its resolution: one row of the validation set for an accuracy. A run that failed or
    left no record leaves its arm undecided. The control is the reference with its initial weights moved in their last
    bit: it shows the run-to-run noise, and how busy the machine was.

    A speed is the median ratio of the times of the same steps, seed by seed, with a 90 % interval over the seeds. If
    either arm may be the faster one, it is printed as "speed undecided". Runs that shared a device, or had devices of
    different models, are not compared in speed.

    Args:
        make_module: Returns a new LightningModule: its class, or a function without arguments. It travels by value, so
            lambdas, functions of a notebook and of the script itself are fine.
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
            seeds or precisions, runs only the missing ones. Runs with other settings, or of other versions of torch,
            Lightning or this package, are refused. `None` keeps nothing.
        executor: Trains several runs at once: :class:`LocalDevices`, or any object with `submit(fn, /, *args)` whose
            result has `done()` and `result()`. Executors of `concurrent.futures`, Dask (`client.get_executor()`),
            submitit, executorlib and Parsl are such. A lost worker is a failed run; call again with the same `dirpath`
            to repeat it. `None`: one run after the other.

    Returns:
        The report. The folder also keeps failed runs, with their errors.

    Raises:
        ValueError: If an argument is wrong, before anything runs if that can be known. If a margin is for a metric
            that the first validation of the reference did not log. If `dirpath` has another comparison.
        RuntimeError: If it is called on several ranks, or by a file that is imported in the process of an arm.
        OSError: If `dirpath` cannot be made.
        ModuleNotFoundError: Without cloudpickle, or with more than one seed without scipy.
        KeyboardInterrupt: If it is interrupted; finished runs stay in `dirpath`.

    Cost: all runs, and about a second to start each on Linux; the first start takes some seconds. After each run the
    final weights are validated once more, by :class:`MetricComparison`, and one training step runs again to count its
    FLOPs. The reported training time includes neither of them.

    """
    return Comparison(**locals()).run()


@final
class Comparison:
    """A comparison. It checks its arguments, which :func:`compare_precisions` documents."""

    def __init__(self, make_module: Any, make_data: Any, precisions: Any, **settings: Any) -> None:
        check_place("compare_precisions")
        self._executor, dirpath = settings.get("executor"), settings.get("dirpath")
        fine = self._executor is None or callable(getattr(self._executor, "submit", None))
        rule = "an object with `submit(fn, *args)`: an executor of `concurrent.futures` or Dask, `LocalDevices()`"
        require(fine and not isinstance(self._executor, type), "executor", rule, self._executor, none="or `None`")
        check_factory("make_module", make_module, LightningModule)
        check_factory("make_data", make_data, LightningDataModule)
        kwargs = check_trainer_kwargs(settings.get("trainer_kwargs"))
        if isinstance(self._executor, LocalDevices):
            self._executor.check_trainer(kwargs)
        arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
        seed, num_seeds, control = (settings[name] for name in ("seed", "num_seeds", "control"))
        require_count("num_seeds", num_seeds)
        require_count("seed", seed, 0)
        require(control is None or isinstance(control, bool), "control", "`True`, `False`", control, none="or `None`")
        require(seed + num_seeds <= 2**32, "seed", "below 2**32, with all of `num_seeds`", seed)
        if num_seeds > 1:
            scipy_special()
        self.plan = plan = Plan(
            make_module=factory_name(make_module),
            make_data=factory_name(make_data),
            arms={label: arm.description for label, arm in arms.items()},
            trainer_kwargs={name: literal(value) for name, value in kwargs.items()},
            seed=seed,
            num_seeds=num_seeds,
            control=num_seeds > 1 if control is None else control,
            margins=parse_margins(settings.get("margins")),
        )
        arms[CONTROL] = replace(arms[plan.reference], label=CONTROL, moved=True)
        self._arms = {
            label: replace(arm, make_module=make_module, make_data=make_data, trainer_kwargs=kwargs)
            for label, arm in arms.items()
        }
        self._store = None
        if dirpath is not None:
            identity = Identity()
            shared = {"make_module": make_module, "make_data": make_data, "trainer_kwargs": kwargs}
            texts = {label: identity.of(arm.source) for label, arm in arms.items()}
            texts[CONTROL] = f"the control of {texts[plan.reference]}"
            shared = {name: identity.of(value) for name, value in shared.items()}
            if identity.unknown:
                raise ValueError(
                    f"With `dirpath`, the text of each setting must tell it from others; that of {identity.unknown[0]}"
                    " does not. Make such an object inside of `make_module` or `make_data`."
                )
            self._store = Store(dirpath, shared, texts)

    def run(self) -> PrecisionReport:
        """Train what is not kept, and judge all runs."""
        return PrecisionReport(self.plan, self._trained(list(self.plan.runs())))

    def run_part(self, part: int, num_parts: int) -> list[Run]:
        """Train one share of the runs, as far as they are not kept; `part` counts from 1.

        A share is a row of neighbours in the order of :meth:`Plan.runs`. So the arms of one seed run on one machine, if
        there are not more parts than seeds.
        """
        runs = list(self.plan.runs())
        first, last = ((part - 1 + i) * len(runs) // num_parts for i in (0, 1))
        return self._trained(runs[first:last])

    def collect(self) -> PrecisionReport:
        """Judge the runs that are kept, those that failed as well; runs that are missing count as failed."""
        found = [self._kept(*key, failed=True) for key in self.plan.runs()]
        runs = [run for run in found if run is not None]
        self._check_margins(runs)
        return PrecisionReport(self.plan, runs)

    def _trained(self, wanted: Sequence[tuple[str, int]]) -> list[Run]:
        """Return runs: those that are kept, and the others after training them."""
        found = {key: self._kept(*key) for key in self.plan.runs()}  # all, so that other settings are refused
        runs = [run for key in wanted if (run := found[key]) is not None]
        self._check_margins(runs)
        with (
            Progress(len(wanted)) as bar,
            closing(HERE),
            tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as scratch,
        ):
            for run in runs:
                bar.finish(f"{run.name}: kept from before")
            todo = [self._spec(*key, Path(scratch)) for key in wanted if found[key] is None]
            folders = {(spec.label, spec.seed): spec.folder for spec in todo}
            with closing(self._train(todo, bar)) as ended:
                for run in ended:
                    if self._store is not None:
                        self._store.save(run)
                    shutil.rmtree(Path(scratch, Path(folders[run.label, run.seed]).name), ignore_errors=True)
                    bar.finish(f"{run.name}: {_ending(run)}")
                    self._check_margins([run])
                    runs.append(run)
        return runs

    def _train(self, specs: Sequence[Spec], bar: Progress) -> Generator[Run]:
        if self._executor is not None:
            yield from run_on(self._executor, specs)
            return
        for spec in specs:
            bar.set_description(f"{spec.label}, seed {spec.seed}")
            yield run_in_process(spec, bar.tick)

    def _spec(self, label: str, seed: int, scratch: Path) -> Spec:
        folder = scratch if self._store is None else self._store.folder or scratch
        margins = self.plan.margins if label == self.plan.reference else {}
        return replace(self._arms[label], seed=seed, folder=str(folder / file_name(label, seed)), margins=margins)

    def _check_margins(self, runs: Sequence[Run]) -> None:
        """Refuse margins for metrics that a run of the reference did not log until its first validation, or its end."""
        for run in runs:
            wrong = wrong_margin(self.plan.margins, run.curves, run.directions)
            if wrong and run.label == self.plan.reference and (run.finished or run.last_validation):
                raise ValueError(wrong)

    def _kept(self, label: str, seed: int, *, failed: bool = False) -> Run | None:
        return None if self._store is None else self._store.load(label, seed, failed=failed)


def _ending(run: Run) -> str:
    error = " ".join((run.error or "").split())
    return f"{run.total_s:.0f} s" if run.finished else f"failed: {error[:160]}{'...' * (len(error) > 160)}"


@final
class Progress(tqdm):  # type: ignore[type-arg]
    """Shows progress on stderr: a bar on a terminal, and in any case a line for each run that ended."""

    def __init__(self, total: int) -> None:
        super().__init__(total=total, file=sys.stderr, disable=None, leave=False, dynamic_ncols=True)  # not in a pipe
        self._done = 0

    def tick(self) -> None:
        """Show the time so far, now and then."""
        self.update(0)

    def finish(self, text: str) -> None:
        """Show how a run ended."""
        self._done += 1
        self.total = max(self.total, self._done)
        self.write(f"[{self._done}/{self.total}] {text}", file=sys.stderr)
        self.update()
