"""Train for some steps at one batch size, in a process of its own, and return its peak memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from typing_extensions import final

from lightning_amp._compat._messages import FRAME, OUT_OF_MEMORY, SHARDING
from lightning_amp._user_line import is_own_project
from lightning_amp.compare import Run, Spec, run_in_process
from lightning_amp.tune.batch_size._batch_size_attribute import FactoryWithBatchSize
from lightning_amp.tune.batch_size._probe import Facts, Probe
from lightning_amp.tune.batch_size._result import Measurement
from lightning_amp.tune.batch_size._short_training import short_trainer


@final
class ShortRuns:
    """Trains for some steps; each run has its own folder and reports its progress to `on_progress`."""

    def __init__(
        self,
        make_module: Any,
        make_data: Any,
        trainer_kwargs: Mapping[str, Any],
        folder: Path,
        on_progress: Callable[[float | None, str], None],
    ) -> None:
        self._factories = make_module, make_data
        self._kwargs, self._folder, self._on_progress = trainer_kwargs, folder, on_progress
        self.num_runs = 0

    def run(self, arm: Spec, size: int | None) -> tuple[Run, Facts]:
        """Train at a batch size, or at the user's own one if it is `None`; return the run and its facts."""
        self.num_runs += 1
        folder = self._folder / str(self.num_runs)
        folder.mkdir(parents=True)
        make_module, make_data = (FactoryWithBatchSize(factory, size) for factory in self._factories)
        spec = replace(
            arm,
            make_module=make_module,
            make_data=make_data,
            trainer_kwargs=short_trainer(self._kwargs, Probe(str(folder / "facts.json"))),
            folder=str(folder),
        )
        found = run_in_process(spec, self._on_progress)
        return found, Facts.read(folder / "facts.json")


def is_out_of_memory(run: Run) -> bool:
    """Return whether the device or the machine ran out of memory."""
    error = run.error or ""
    return bool(OUT_OF_MEMORY.search(error)) or run.killed_by == "SIGKILL"


def measurement(run: Run, facts: Facts, size: int) -> Measurement:
    """Return the measurement of a run at `size`; a run with an error ran out of memory."""
    if run.error is not None:
        return Measurement(size, float("inf"), float("nan"))
    assert run.peak_memory_bytes is not None
    speed = float("nan")
    if facts.batch_rows == size and run.samples_per_s:
        speed = median(run.samples_per_s)
    elif run.step_s:  # the rows are not in the first dimension
        speed = size * facts.world_size / median(run.step_s)
    return Measurement(size, run.peak_memory_bytes / 2**30, speed)


def failure(run: Run) -> str:
    """Write the error that ended a run, with the user's own line that raised it, and what a sharded module lacks."""
    text = " ".join((run.error or "").split()).rstrip(".")
    frames = FRAME.findall(run.log)
    own = [frame for frame in frames if is_own_project(frame[0])]
    if not own:
        return text
    file, line, function = own[-1]
    text = f"{text} ({file}, line {line}, in {function})"
    if any(frame[2] == "configure_model" for frame in own) and SHARDING.search(run.log):
        text += (
            ". A single device cannot shard the module: pass your strategy in `trainer_kwargs`, or begin"
            " `configure_model` with `if self.device_mesh is None: return`"
        )
    return text
