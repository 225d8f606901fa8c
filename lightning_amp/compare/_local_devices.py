"""`LocalDevices`: run several trainings at once, each on its own devices or CPU cores of this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from typing_extensions import final

from lightning_amp._arguments import is_count, require, require_count
from lightning_amp.compare._process import HERE

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable by which a process sees some devices of a type only, numbered from 0 on."""

_Place = tuple[Mapping[str, str], Sequence[int]]
"""Variables that select devices, and numbers of CPU cores; empty: all of them."""


@final
class LocalDevices:
    """An executor for this machine: each run gets accelerators, or CPU cores, that no other run of it has.

    .. code-block:: python

        executor = LocalDevices()  # as many runs at once as there are GPUs
        report = compare_precisions(Model, Data, trainer_kwargs=dict(max_epochs=10), executor=executor)

    Each run sees its own devices only (`CUDA_VISIBLE_DEVICES`, or the same of another accelerator), numbered from 0 on.
    Without an accelerator the CPU cores are divided: each run is bound to its share, and has as many threads. The
    number of threads is a setting of torch that may change the last bits of large sums. So a run
    gives the same bits as a process with that many threads.

    Args:
        devices: Numbers or names of the accelerators: `[0, 2]`, `["GPU-7f3a..."]`. `None`: all that this process sees.
        per_run: Number of accelerators for each run: 2 for `trainer_kwargs=dict(devices=2, strategy="ddp")`.
        num: The most runs at once. `None`: as many as there are devices for; one without an accelerator.

    Raises:
        ValueError: If an argument is wrong, or if there are too few devices or cores.

    """

    def __init__(self, devices: Sequence[int | str] | None = None, per_run: int = 1, num: int | None = None) -> None:
        require_count("per_run", per_run)
        if num is not None:
            require_count("num", num)
        self._places = _places(devices, per_run, num)
        self._per_run = per_run
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_at_once(self) -> int:
        """Return how many runs there are at once."""
        return len(self._places)

    def check_trainer(self, trainer_kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of the Trainer that ask for other devices than a run gets here.

        Raises:
            ValueError: If they do.

        """
        devices = trainer_kwargs.get("devices", "auto")
        if self._places[0][0] and devices not in ("auto", -1, "-1", self._per_run, str(self._per_run)):
            raise ValueError(
                f"`trainer_kwargs['devices']` is {devices!r}, but `LocalDevices` gives each run {self._per_run},"
                " numbered from 0 on. Write `LocalDevices(per_run=...)`, and leave `devices` out."
            )

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Job:
        """Call `fn` in a thread as soon as devices are free. A run that it starts gets these devices."""
        if self._pool is None:
            free = queue.SimpleQueue[_Place]()
            for place in self._places:
                free.put(place)

            def take() -> None:
                HERE.environment, HERE.cores = free.get()

            self._pool = ThreadPoolExecutor(self.num_at_once, "lightning-amp", take)
        stop = threading.Event()
        return Job(self._pool.submit(_call, stop, fn, *args), stop)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more runs, as executors of `concurrent.futures` do."""
        if self._pool is not None:
            self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _call(stop: threading.Event, fn: Callable[..., Any], *args: Any) -> Any:
    HERE.stop = stop
    return fn(*args)


@final
class Job:
    """The future of a run on :class:`LocalDevices`."""

    def __init__(self, future: Future[Any], stop: threading.Event) -> None:
        self._future, self._stop = future, stop

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the end of the run, and return its result or raise its exception."""
        return self._future.result()

    def cancel(self) -> bool:
        """Take the run out of the queue, or kill its process; return whether it had not ended."""
        self._stop.set()
        return self._future.cancel() or not self._future.done()


def visible_devices(device_type: str) -> list[str]:
    """Return the devices that the environment names for this process; empty if it names none."""
    text = os.environ.get(_VISIBLE.get(device_type, ""), "")
    return [name.strip() for name in text.split(",") if name.strip()]


def _places(devices: Sequence[int | str] | None, per_run: int, num: int | None) -> list[_Place]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in _VISIBLE:
        require(devices is None, "devices", "`None` on a machine without accelerators that can be divided", devices)
        require(per_run == 1, "per_run", "1 on a machine without accelerators that can be divided", per_run)
        return _cores(num or 1)
    kind = accelerator.type
    seen = names = visible_devices(kind) or [str(i) for i in range(torch.accelerator.device_count())]
    if devices is not None:
        fine = isinstance(devices, Sequence) and not isinstance(devices, str)
        fine = fine and all(isinstance(d, str) or (is_count(d, 0) and d < len(seen)) for d in devices)
        names = [seen[device] if isinstance(device, int) else device for device in devices] if fine else []
        rule = f"a list of different devices: numbers below {len(seen)}, or names"
        require(bool(names) and len(set(names)) == len(names), "devices", rule, devices, none="or `None`")
    groups = [names[i : i + per_run] for i in range(0, len(names) - per_run + 1, per_run)][:num]
    require(bool(groups), "per_run", f"at most the number of devices, {len(names)}", per_run)
    return [({_VISIBLE[kind]: ",".join(group)}, ()) for group in groups]


def _cores(num: int) -> list[_Place]:
    """Divide the cores that this process may use."""
    cores = list(range(os.cpu_count() or 1))
    with contextlib.suppress(AttributeError):  # not on macOS
        cores = sorted(os.sched_getaffinity(0))
    require(num <= len(cores), "num", f"at most the number of CPU cores, {len(cores)}", num)
    share = len(cores) // num
    return [({}, cores[i * share : (i + 1) * share] if num > 1 else ()) for i in range(num)]
