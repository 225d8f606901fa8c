"""One comparison from its arguments to its report: which runs there are, where they are kept, and who trains them."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp._arguments import require
from lightning_amp.compare._arms import parse_arms
from lightning_amp.compare._checks import (
    check_margins,
    check_place,
    check_seeds,
    check_trainer_kwargs,
    parse_margins,
)
from lightning_amp.compare._describe import identity, shown, without_identity
from lightning_amp.compare._executors import Dispatcher, check_executor
from lightning_amp.compare._factories import by_value, check_factory, dumps_for, factory_name
from lightning_amp.compare._fork_server import FORK_SERVER
from lightning_amp.compare._local_devices import LocalDevices
from lightning_amp.compare._pack import pack, run_in_process
from lightning_amp.compare._plan import CONTROL, MeasureSpeed, Plan
from lightning_amp.compare._progress import Progress, progress
from lightning_amp.compare._remote import Assignment, versions
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._short_training import StopWhenMeasured, short_trainer
from lightning_amp.compare._statistics import scipy_special
from lightning_amp.compare._store import Store, file_name
from lightning_amp.compare._worker import Task

_SPEED = "speed"
"""Short runs that only measure speed are kept beside the others under this name."""

_LEAST_ROUNDS = 3
_STEADY_STEPS, _STEADY_S, _MOST_STEPS = 50, 2.0, 200


@final
class Comparison:
    """A comparison whose arguments are checked.

    Args and errors are those of :func:`compare_precisions`.
    """

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        make_data: Callable[[], LightningDataModule],
        precisions: Sequence[Any] | Mapping[str, Any],
        *,
        trainer_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        num_seeds: int = 1,
        margins: Mapping[str, Any] | None = None,
        control: bool | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        executor: Any = None,
        measure_speed: MeasureSpeed = "as run",
    ) -> None:
        check_place("compare_precisions")
        check_executor(executor)
        legal = "'as run', 'alone'"
        require(measure_speed in ("as run", "alone", False), "measure_speed", legal, measure_speed, none="or `False`")
        self._executor = executor
        self._factories = make_module, make_data
        self._dumps = dumps_for(executor, *self._factories)
        check_factory("make_module", make_module, LightningModule, self._dumps)
        check_factory("make_data", make_data, LightningDataModule, self._dumps)
        self._kwargs = kwargs = check_trainer_kwargs(trainer_kwargs)
        if isinstance(executor, LocalDevices):
            executor.check_trainer(kwargs)
        self._arms = arms = parse_arms(precisions, kwargs.get("strategy", "auto"))
        check_seeds(seed, num_seeds, control)
        parsed_margins = parse_margins(margins)
        if num_seeds > 1:
            scipy_special()
        self.plan = plan = Plan(
            make_module=factory_name(make_module),
            make_data=factory_name(make_data),
            arms={label: arm.description for label, arm in arms.items()},
            trainer_kwargs={name: shown(value) for name, value in kwargs.items()},
            seed=seed,
            num_seeds=num_seeds,
            control=num_seeds > 1 if control is None else control,
            margins=parsed_margins,
            measure_speed=measure_speed or "off",
        )
        self._store = None
        if dirpath is not None:
            sources = {label: arm.source for label, arm in arms.items()}
            settings = {
                "make_module": identity(make_module),
                "make_data": identity(make_data),
                "trainer_kwargs": {name: identity(kwargs[name]) for name in sorted(kwargs)},
            }
            texts = {label: identity(source) for label, source in sources.items()}
            if plan.control:
                texts[CONTROL] = f"the control of {texts[plan.reference]}"
            unnamed = [factory_name(factory) for factory in self._factories if by_value(factory)]
            unnamed += without_identity([make_module, make_data, sources, kwargs])
            self._store = Store(dirpath, settings, texts, unnamed)

    # -- what callers do -----------------------------------------------------------------------------------------------

    def run(self) -> PrecisionReport:
        """Train what is not kept, and judge all runs."""
        return PrecisionReport(self.plan, self._trained(list(self.plan.runs())), self._speed_runs())

    def run_part(self, part: int, num_parts: int) -> list[ArmRun]:
        """Train one share of the runs, as far as they are not kept; `part` counts from 1.

        A share is a row of neighbours in the order of :meth:`Plan.runs`. So the arms of one seed run on one machine, if
        there are not more parts than seeds.
        """
        runs = list(self.plan.runs())
        first, last = ((part - 1 + i) * len(runs) // num_parts for i in (0, 1))
        return self._trained(runs[first:last])

    def collect(self) -> tuple[PrecisionReport, list[tuple[str, int]]]:
        """Judge the runs that are kept, those that failed as well; return the report, and the runs that are missing."""
        found = {key: self._kept(*key, failed=True) for key in self.plan.runs()}
        runs = [run for run in found.values() if run is not None]
        for run in runs:
            if run.finished:
                check_margins(self.plan.margins, run)
                break
        speed = [self._kept(label, seed, _SPEED) for label, seed in self._speed_rounds()]
        report = PrecisionReport(self.plan, runs, [run for run in speed if run is not None])
        return report, [key for key, run in found.items() if run is None]

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _trained(self, wanted: Sequence[tuple[str, int]]) -> list[ArmRun]:
        """Return runs: those that are kept, and the others after training them."""
        runs: dict[tuple[str, int], ArmRun] = {}
        with progress(len(wanted)) as bar:

            def add(run: ArmRun, how: str) -> None:
                bar.finish(f"{_name(run.label, run.seed)}: {how}", _name(run.label, run.seed))
                if run.finished and not any(other.finished for other in runs.values()):
                    check_margins(self.plan.margins, run)
                runs[run.label, run.seed] = run

            todo: list[tuple[str, int]] = []
            for key in wanted:
                kept = self._kept(*key)
                if kept is None:
                    todo.append(key)
                else:
                    add(kept, "kept from before")
            self._train(todo, bar, lambda _, ended: [add(run, _ending(run)) for run in ended])
        return [runs[key] for key in wanted]

    def _speed_runs(self) -> list[ArmRun]:
        """Return short runs of all arms, in rounds, on one device that no other run of this comparison has."""
        if self.plan.measure_speed != "alone":
            return []
        rounds = list(self._speed_rounds())
        kept = [self._kept(*key, _SPEED) for key in rounds]
        if all(run is not None for run in kept):
            return [run for run in kept if run is not None]
        runs: list[ArmRun] = []
        with progress(len(rounds) if self._executor is None else 1) as bar:

            def add(name: str, ended: list[ArmRun]) -> None:
                runs.extend(ended)
                bar.finish(f"{name}: {next((_ending(run) for run in ended if not run.finished), 'measured')}", name)

            self._train(rounds, bar, add, _SPEED)
        return runs

    def _speed_rounds(self) -> Iterator[tuple[str, int]]:
        for number in range(max(_LEAST_ROUNDS, self.plan.num_seeds)):
            yield from ((label, self.plan.seed + number) for label in self.plan.labels[:: -1 if number % 2 else 1])

    def _train(
        self,
        keys: Sequence[tuple[str, int]],
        bar: Progress,
        on_runs: Callable[[str, list[ArmRun]], object],
        what: str = "",
    ) -> None:
        """Train runs, keep them, and pass them to `on_runs` with their name, in the order in which they end."""
        with (
            FORK_SERVER.warm(),
            tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as name,
        ):
            scratch = Path(name)
            if self._executor is not None:
                self._dispatch(keys, bar, on_runs, what, scratch)
                return
            for label, seed in keys:
                bar.start(_name(label, seed))
                folder = self._folder(label, seed, what, scratch)
                run = run_in_process(self._task(label, seed, folder, what), bar.move)
                if self._store is not None:
                    self._store.save(run, what)
                shutil.rmtree(scratch / folder.name, ignore_errors=True)  # checkpoints may fill the disk
                on_runs(_name(label, seed), [run])

    def _dispatch(
        self,
        keys: Sequence[tuple[str, int]],
        bar: Progress,
        on_runs: Callable[[str, list[ArmRun]], object],
        what: str,
        scratch: Path,
    ) -> None:
        store = self._store
        folders = [self._folder(label, seed, what, scratch) for label, seed in keys]
        packed = [pack(self._task(*key, folder, what), self._dumps) for key, folder in zip(keys, folders, strict=True)]
        files = [] if store is None else [store.file(label, seed, what) for label, seed in keys]
        # short runs are one assignment, so that one device trains them, one after the other
        shares = [slice(None)] if what else [slice(i, i + 1) for i in range(len(keys))]
        assignments = [
            Assignment(
                tasks=tuple(packed[share]),
                folders=tuple(map(str, folders[share])),
                files=tuple(files[share]),
                versions=versions(),
                caller=(platform.node(), os.getpid()),
            )
            for share in shares
        ]

        def ended(assignment: Assignment, runs: list[ArmRun]) -> None:
            for run, folder in zip(runs, assignment.folders, strict=True):
                if store is not None and store.load(run.label, run.seed, what, failed=True) != run:
                    store.save(run, what)  # the worker could not, or died
                shutil.rmtree(scratch / Path(folder).name, ignore_errors=True)
            on_runs(assignment.name, runs)

        is_here = store is not None and isinstance(store.folder, Path)
        place = store.folder if store is not None and is_here else scratch
        warn = (lambda _: None) if store is None else store.warn_of
        Dispatcher(self._executor, bar, ended, warn, Path(place)).run(assignments)

    def _task(self, label: str, seed: int, folder: Path, what: str) -> Task:
        kwargs = self._kwargs
        if what:
            kwargs = short_trainer(kwargs, StopWhenMeasured(_STEADY_STEPS, _STEADY_S, _MOST_STEPS))
        return Task(
            label=label,
            seed=seed,
            arm=self._arms.get(label, self._arms[self.plan.reference]),
            moved=label not in self._arms,
            make_module=self._factories[0],
            make_data=self._factories[1],
            trainer_kwargs=kwargs,
            work_folder=str(folder),
        )

    def _folder(self, label: str, seed: int, what: str, scratch: Path) -> Path:
        kept = None if self._store is None or what else self._store.work_folder(label, seed)
        return (kept or scratch / f"{file_name(label, seed)}{what}").absolute()

    def _kept(self, label: str, seed: int, what: str = "", *, failed: bool = False) -> ArmRun | None:
        return None if self._store is None else self._store.load(label, seed, what, failed=failed)


def _name(label: str, seed: int) -> str:
    return f"{label}, seed {seed}"


def _ending(run: ArmRun) -> str:
    error = " ".join((run.error or "").split())
    cut = error if len(error) <= 160 else f"{error[:160]}..."
    again = ", after a worker was lost" if run.first_attempt else ""
    return f"{run.total_s:.0f} s{again}" if run.finished else f"failed{again}: {cut}"
