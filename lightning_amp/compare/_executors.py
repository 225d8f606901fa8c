"""Send runs to an executor: on other devices, in other processes, or on other machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import final

from lightning_amp._arguments import require
from lightning_amp.compare._process import pack, run_packed, versions
from lightning_amp.compare._run import Run, from_data, to_data

if TYPE_CHECKING:
    from lightning_amp.compare._spec import Spec

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


def run_on(executor: Any, specs: Sequence[Spec]) -> Iterator[Run]:
    """Train on the workers of an executor, and return each run when it has ended.

    A worker that dies, refuses or has other packages is a failed run, and the others go on. If this is interrupted, no
    run is queued or runs afterwards, as far as the executor allows.
    """
    jobs: dict[int, Any] = {}
    try:
        for number, spec in enumerate(specs):
            # a worker without this package raises `ModuleNotFoundError` in `pickle.loads`; a worker of Dask that cannot
            # read a call ends, and the caller would wait for ever
            jobs[number] = executor.submit(pickle.loads, pickle.dumps(_Call(pack(spec))))
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


@final
class _Call:
    """Unpickled, it is the answer of :func:`_train`."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return _train, (self._packed,)


def _train(packed: bytes) -> dict[str, Any]:
    """Train in a process of this worker, and return the data of the run."""
    header = pickle.loads(packed)
    here = versions()
    wrong = [
        f"{name} is {here[name]}, not {wanted}" for name, wanted in header["versions"].items() if here[name] != wanted
    ]
    if wrong:
        error = f"the worker on {platform.node()} has other packages: {', '.join(wrong)}"
        return to_data(Run(header["label"], header["seed"], error=error))
    own = [entry or os.getcwd() for entry in sys.path]
    header["path"] = [*own, *(entry for entry in header["path"] if entry not in own)]
    return to_data(run_packed(header))
