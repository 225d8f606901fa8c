"""Train a run in a process on this machine, or on an executor: other devices, processes or machines."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_amp._arguments import require
from lightning_amp.compare._process import Call, run_packed
from lightning_amp.compare._run import Run, from_data
from lightning_amp.compare._spec import Spec, pack

_POLL_S = 0.1
_STOP_WITHIN_S = 5.0


def check_executor(executor: object) -> None:
    """Refuse an object that is no executor.

    Raises:
        ValueError: If it has no `submit`.

    """
    fine = executor is None or (callable(getattr(executor, "submit", None)) and not isinstance(executor, type))
    rule = "an object with `submit(fn, *args)`: an executor of `concurrent.futures`, Dask or submitit, `LocalDevices()`"
    require(fine, "executor", rule, executor, none="or `None`")


def run_in_process(spec: Spec, tick: Callable[[], object]) -> Run:
    """Train in a new process on this machine: see :func:`~lightning_amp.compare._process.run_packed`."""
    return run_packed(pickle.loads(pack(spec)), tick)


def run_on(executor: Any, specs: Sequence[Spec]) -> Iterator[Run]:
    """Train on the workers of an executor, and return each run when it has ended.

    A worker that dies, refuses or has other packages is a failed run, and the others go on. If this is interrupted, no
    run is queued or runs afterwards, as far as the executor allows.
    """
    jobs: dict[int, Any] = {}
    try:
        for number, spec in enumerate(specs):
            jobs[number] = executor.submit(pickle.loads, pickle.dumps(Call(pack(spec))))
        while jobs:
            ended = [number for number, job in jobs.items() if job.done()]
            for number in ended:
                yield _run_of(jobs.pop(number), specs[number])
            time.sleep(0 if ended else _POLL_S)
    finally:
        for job in jobs.values():
            with contextlib.suppress(Exception):
                job.cancel()
        deadline = time.monotonic() + _STOP_WITHIN_S
        while time.monotonic() < deadline and not all(job.done() for job in jobs.values()):
            time.sleep(_POLL_S)


def _run_of(job: Any, spec: Spec) -> Run:
    try:
        return from_data(Run, job.result())
    except (Exception, asyncio.CancelledError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Run(spec.label, spec.seed, error=f"its worker was lost or refused it: {text[:300]}")
