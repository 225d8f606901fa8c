"""Train for some steps at one batch size, in a process of its own, and return its peak memory and speed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp._compat._messages import FRAME, OUT_OF_MEMORY
from lightning_amp._compat._names import (
    Callback,
    CombinedLoader,
    DummyLogger,
    LightningModule,
    Trainer,
    is_overridden,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)
from lightning_amp._user_line import is_own_project
from lightning_amp.compare import Run, Spec, num_rows, run_in_process
from lightning_amp.measure import is_settled
from lightning_amp.shadow import remove_callbacks
from lightning_amp.tune._batch_sizes import Measurement

NAME = "batch_size"
_STEADY_BATCHES, _STEADY_S = (6, 100), 2.0
"""Steady batches to time: the lower number if they take that many seconds, at most the upper one."""
_MOST_BATCHES = 1000
"""Batches of a module that takes no optimizer step."""
_LEFT_OUT = {
    "barebones", "check_val_every_n_epoch", "default_root_dir", "enable_checkpointing", "max_time", "min_epochs",
    "min_steps", "overfit_batches", "profiler", "val_check_interval",
}  # fmt: skip
"""Arguments of the Trainer about the length of training and what it writes."""
NOT_OF_THE_BATCH_GIB = 0.125
"""Growth of a process that is not the batch's: libraries loaded at the first step, and the count of tensors."""


@final
@dataclass(frozen=True)
class Facts:
    """Facts about one training that the record of a run does not contain.

    Attributes:
        refused: Message for the user if nothing has a batch size.
        own_size: The module's own batch size.
        rows: Rows of the largest batch; 0 if unknown.
        num_rows: Rows that an epoch draws, on each device; `None` if unknown or endless.
        num_batches: Number of trained batches.
        per_step: Batches for each optimizer step, on all devices together.
        device: Type of the device; empty if training did not begin.
        device_gib: Memory that this process can use; `None` if the device does not report it.
        process_gib: On a CPU, how much the process grew at most since it made the module; 0 where that is unknown.
        rates: Optimizer and learning rate of each parameter group.

    """

    refused: str = ""
    own_size: int = 0
    rows: int = 0
    num_rows: int | None = None
    num_batches: int = 0
    per_step: int = 1
    device: str = ""
    device_gib: float | None = None
    process_gib: float = 0.0
    rates: Sequence[Sequence[Any]] = ()


def run_once(
    arm: Spec,
    factories: tuple[Callable[[], Any], Callable[[], Any]],
    size: int | None,
    trainer_kwargs: Mapping[str, Any],
    folder: Path,
    tick: Callable[[], object],
) -> tuple[Run, Facts]:
    """Train at a batch size, or at the user's own one if it is `None`; return the record of the run and its facts."""
    facts = folder / "facts.json"
    kwargs = short_trainer(trainer_kwargs, Probe(str(facts), size))
    spec = replace(arm, make_module=factories[0], make_data=factories[1], trainer_kwargs=kwargs, folder=str(folder))
    run = run_in_process(spec, tick)
    return run, Facts(**json.loads(facts.read_text(encoding="utf-8"))) if facts.exists() else Facts()


def measurement(run: Run, facts: Facts, size: int) -> Measurement:
    """Return what a run at `size` held, and its speed; a run with an error ran out of memory."""
    if run.error is not None:
        return Measurement(size, math.inf, math.nan)
    speed = size / median(run.step_s) if run.step_s else math.nan
    if facts.rows == size and run.samples_per_s:
        speed = median(run.samples_per_s)
    held = max((run.peak_memory_bytes or 0) / 2**30, facts.process_gib - NOT_OF_THE_BATCH_GIB)
    return Measurement(size, held, speed)


def is_out_of_memory(run: Run) -> bool:
    """Return whether the device or the machine ran out of memory."""
    return bool(OUT_OF_MEMORY.search(run.error or "")) or run.killed_by == "SIGKILL"


def why_failed(run: Run) -> str:
    """Write the error that ended a run, with the user's own line that raised it."""
    text = " ".join((run.error or "").split()).rstrip(".")
    own = [frame for frame in FRAME.findall(run.log) if is_own_project(frame[0])]
    return f"{text} ({own[-1][0]}, line {own[-1][1]}, in {own[-1][2]})" if own else text


# -- in the process of the run -----------------------------------------------------------------------------------------


def short_trainer(trainer_kwargs: Mapping[str, Any], probe: Callback) -> dict[str, Any]:
    """Return arguments of a Trainer that trains until `probe` ends it, and neither validates nor writes."""
    kwargs = {name: value for name, value in trainer_kwargs.items() if name not in _LEFT_OUT}
    if isinstance(kwargs.get("limit_train_batches"), float):  # a share of a few large batches may be less than one
        del kwargs["limit_train_batches"]
    given = kwargs.pop("callbacks", None) or []
    return {
        **kwargs,
        "callbacks": [*(given if isinstance(given, (list, tuple)) else [given]), probe],
        "enable_progress_bar": True,  # Lightning refuses `False` beside a bar; the probe removes all bars
        "limit_val_batches": 0,
        "logger": DummyLogger(),
        "max_epochs": 1000,  # finite, because schedules may read the number of steps
        "max_steps": max(trainer_kwargs.get("max_steps") or 0, 10_000),
        "num_sanity_val_steps": 0,
    }


@final
class Probe(Callback):
    """Sets the batch size, ends a training as soon as its memory and its speed are known, and writes the facts."""

    def __init__(self, path: str, size: int | None) -> None:
        self._path, self._size = path, size
        self._facts: dict[str, Any] = asdict(Facts())
        self._settled_at: tuple[int, float] | None = None
        self._first_gib = math.nan

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Measure the process from here on, before the module and the data set are made."""
        vars(self).update(state)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._first_gib = _peak_gib()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        remove_callbacks(trainer)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None and not is_overridden("train_dataloader", data):  # Lightning would not ask the module
            vars(data)["train_dataloader"] = pl_module.train_dataloader
        held: Any = lightning_getattr(pl_module, NAME) if lightning_hasattr(pl_module, NAME) else None
        if not isinstance(held, Integral) or isinstance(held, bool) or int(held) < 1:
            self._note(refused=_NO_SIZE.format(found="there is none" if held is None else f"it is {held!r}"))
            raise ValueError(self._facts["refused"])
        self._note(own_size=int(held))
        if self._size is not None:
            lightning_setattr(pl_module, NAME, self._size)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # the schedule may monitor a metric of validation, which does not run
        device = trainer.strategy.root_device
        self._note(
            num_rows=_num_rows(trainer),
            per_step=trainer.accumulate_grad_batches * trainer.world_size,
            device=device.type,
            device_gib=_free_gib(device),
            rates=[rate for optimizer in trainer.optimizers for rate in _rates(optimizer)],
        )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._facts["rows"] = max(self._facts["rows"], _loader_size(trainer) or num_rows(batch) or 0)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        number = self._facts["num_batches"] = self._facts["num_batches"] + 1
        now, skipped = time.monotonic(), getattr(trainer.precision_plugin, "num_skipped", 0)
        if self._settled_at is None:
            if self._facts["device"] == "cpu":  # read only here, because the profile of these steps is summed up next
                grown = _peak_gib() - self._first_gib
                self._facts["process_gib"] = grown if math.isfinite(grown) else 0.0
            if is_settled(number, trainer.global_step, skipped):
                self._settled_at = number, now
        settled, since_s = self._settled_at or (number, now)
        (least, most), batches, seconds = _STEADY_BATCHES, number - settled, now - since_s
        is_timed = batches >= most or (batches >= least and seconds >= _STEADY_S) or seconds >= 5 * _STEADY_S
        if number >= _MOST_BATCHES or is_timed:
            trainer.should_stop = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._note()

    def _note(self, **facts: Any) -> None:
        self._facts.update(facts)
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        Path(self._path).write_text(json.dumps(self._facts), encoding="utf-8")


_NO_SIZE = (
    "`make_data` or `make_module` must have a `batch_size` of 1 or more, an attribute or one of `hparams`, that the"
    " loaders are made with; {found}. Write `self.batch_size = batch_size` in `__init__`, and `DataLoader(...,"
    " batch_size=self.batch_size)` in `train_dataloader`."
)


def _loader(trainer: Trainer) -> Any:
    return CombinedLoader(trainer.train_dataloader, "sequential").flattened[0]


def _loader_size(trainer: Trainer) -> int | None:
    """Return the batch size that the loader says it has: the rows of a batch need not be its first dimension."""
    loader = _loader(trainer)
    sizes = [getattr(place, NAME, None) for place in (loader, getattr(loader, "batch_sampler", None))]
    return next((size for size in sizes if isinstance(size, int)), None)


def _num_rows(trainer: Trainer) -> int | None:
    """Return how many rows an epoch draws, without drawing them; `None` if the loader does not say."""
    loader = _loader(trainer)
    if getattr(loader, "batch_sampler", None) is None:  # each index that it draws is a whole batch
        return None
    for name in ("sampler", "dataset"):
        with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
            return len(getattr(loader, name))
    return None


def _free_gib(device: torch.device) -> float | None:
    """Return the memory that this process can use: the free memory and the memory that it already holds."""
    if device.type == "cpu":
        return None
    backend: Any = torch.get_device_module(device.type)
    with contextlib.suppress(Exception):  # not every device reports its memory
        return (backend.mem_get_info(device)[0] + backend.memory_reserved(device)) / 2**30
    return None


def _rates(optimizer: torch.optim.Optimizer) -> list[tuple[str, float]]:
    """Return the rate of each group as the user set it; a schedule may have changed the current one already."""
    rates = [group.get("max_lr", group.get("initial_lr", group.get("lr"))) for group in optimizer.param_groups]
    return [(type(optimizer).__name__, float(rate)) for rate in rates if rate is not None]


def _peak_gib() -> float:
    """Return the most memory that this process had, as Linux counts it; NaN on other systems, which cannot reset it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
    return math.nan
