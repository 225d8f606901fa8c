"""Train one arm with one seed, in a process of its own, and write its record to a file."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import platform
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning import __version__ as lightning_version
from lightning.pytorch import Callback
from typing_extensions import final

from lightning_amp._compat import _lightning
from lightning_amp._cpu_name import cpu_name
from lightning_amp._files import write_atomically
from lightning_amp.callbacks import MetricComparison, ScaleMonitor
from lightning_amp.casting import our_name
from lightning_amp.compare._arms import ArmSpec
from lightning_amp.compare._control import LastBitMover
from lightning_amp.compare._factories import can_be_found
from lightning_amp.compare._observer import Observer
from lightning_amp.compare._place import visible_devices
from lightning_amp.compare._process import CANNOT_IMPORT, PROGRESS, RESULT
from lightning_amp.compare._run import ArmRun, Point
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import ScaleHistory
from lightning_amp.tracing import fp32_switches, reduces_fp32


@final
@dataclass(frozen=True)
class Task:
    """One training, in the form in which it is pickled for its process."""

    label: str
    seed: int
    arm: ArmSpec
    moved: bool
    make_module: Any
    make_data: Any
    trainer_kwargs: Mapping[str, Any]
    work_folder: str


def main(header: Mapping[str, Any], started: float) -> None:
    """Run the task in the header's folder, and write its record there; `sys.path` is set.

    Args:
        header: The folder, the settings of torch, and where to find the modules that the task was pickled from.
        started: The time at which the process began, as `time.time()`.

    """
    folder = Path(header["folder"])
    apply_settings(header["settings"])
    try:
        task = _unpickle((folder / "task.pickle").read_bytes(), header)
    except BaseException as error:
        _write(folder, {CANNOT_IMPORT: f"{type(error).__name__}: {error}"})
        raise
    run = run_arm(replace(task, work_folder=header["work_folder"]), folder, started)
    if _lightning.is_rank_zero():
        _write(folder, {"run": run.to_data()})


def run_arm(task: Task, folder: Path, started: float) -> ArmRun:
    """Train, and return the record of the run; The progress is written into `folder`."""
    observer = Observer(lambda share, text: _say(folder, share, text))
    trainer: Trainer | None = None
    error: str | None = None
    try:
        seed_everything(task.seed, verbose=False)
        module = _make(task.make_module, "make_module", LightningModule)
        data = _make(task.make_data, "make_data", LightningDataModule)
        trainer = _trainer(task, observer)
        trainer.fit(module, datamodule=data)
        if trainer.interrupted or not trainer.state.finished:
            error = "the run was interrupted"
        elif observer.curves and _callback(trainer, MetricComparison) is None:
            _compare_in_fp32(trainer, module, data)
    except SystemExit as exit_:  # Lightning raises it after an interrupt
        error = f"the run ended by `sys.exit({exit_.code!r})`"
    except Exception as caught:
        with contextlib.suppress(OSError):  # the disk is full
            traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    return _sum_up(task, observer, trainer, error, started)


def _make(factory: Any, argument: str, kind: type) -> Any:
    made = factory()
    if not isinstance(made, kind):
        raise TypeError(f"`{argument}` must return a {kind.__name__}; it returned {type(made).__name__}.")
    return made


def _trainer(task: Task, observer: Observer) -> Trainer:
    kwargs = dict(task.trainer_kwargs)
    given = kwargs.pop("callbacks", None) or []
    callbacks = [given] if isinstance(given, Callback) else list(given)
    if not any(isinstance(callback, ScaleMonitor) for callback in callbacks):
        callbacks.append(ScaleMonitor())
    callbacks.append(observer)
    if task.moved:
        callbacks.append(LastBitMover(task.seed))
    kwargs.setdefault("default_root_dir", task.work_folder)
    kwargs.setdefault("enable_progress_bar", False)
    plugin = task.arm.plugin(kwargs.get("strategy", "auto"))
    return Trainer(**kwargs, callbacks=callbacks, plugins=[plugin])


def _compare_in_fp32(trainer: Trainer, module: LightningModule, data: LightningDataModule) -> None:
    """Validate the final weights once more, together with an fp32 copy.

    This comes after the fit. So the fit has the same values as a run without this package, even if user code counts its
    validations outside of the module.
    """
    trainer.callbacks.append(MetricComparison())  # type: ignore[attr-defined]
    try:
        trainer.validate(module, datamodule=data, verbose=False)
    except Exception:  # without it, the report has no comparison with fp32
        with contextlib.suppress(OSError):
            traceback.print_exc()


def _sum_up(task: Task, observer: Observer, trainer: Trainer | None, error: str | None, started: float) -> ArmRun:
    watch, now = observer.watch, time.time()
    elapsed = watch.elapsed_s()
    monitor = _callback(trainer, ScaleMonitor)
    comparison = _callback(trainer, MetricComparison)
    history = ScaleHistory() if monitor is None else monitor.history
    plugin = None if trainer is None else trainer.strategy.precision_plugin
    scaled = isinstance(getattr(plugin, "scaler", None), torch.amp.GradScaler)
    rows = [] if comparison is None else comparison.table.last
    applied = 0 if trainer is None else trainer.global_step
    steps = _thin(watch.steady())

    def points(values: list[tuple[int, float]]) -> tuple[Point, ...]:
        return tuple(Point(step, elapsed[min(step, len(elapsed) - 1)], value) for step, value in values)

    return ArmRun(
        label=task.label,
        seed=task.seed,
        error=error,
        precision=_precision(plugin, history),
        device=_device_name(observer.device, trainer),
        devices=device_ids(trainer),
        num_threads=torch.get_num_threads(),
        tf32=reduces_fp32(observer.device.type),
        versions={
            "lightning_amp": sys.modules["lightning_amp"].__version__,
            "torch": str(torch.__version__),
            "lightning": lightning_version,
            "Python": platform.python_version(),
        },
        curves={name: points(values) for name, values in observer.curves.items()},
        last_validation=observer.last_validation,
        directions=observer.directions,
        loss=points(observer.losses()),
        same_weights={row.metric: (row.amp, row.fp32) for row in rows},
        step_s=tuple(watch.step_s(steps)),
        timed_steps=tuple(steps),
        samples_per_s=tuple(watch.samples_per_s(steps)),
        train_s=elapsed[-1],
        total_s=now - started,
        peak_memory_bytes=observer.peak_memory_bytes,
        memory_of=observer.memory_of if observer.peak_memory_bytes is not None else None,
        num_steps=applied if history.last is None else history.num_steps,
        num_skipped=history.num_skipped,
        scale=tuple(history) if scaled else (),
        matmul_flops=observer.matmul_flops,
    )


def _callback(trainer: Trainer | None, kind: Any) -> Any:
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _precision(plugin: Any, history: ScaleHistory) -> str:
    """Return our name for the precision, or Lightning's name under other plugins."""
    if plugin is None:
        return ""
    if isinstance(plugin, AmpPrecision):
        if history.last is not None and history.last.precision:
            return history.last.precision  # Lightning has the same name for fp8 and bf16
        return our_name(plugin.precision)
    return f"{plugin.precision} ({type(plugin).__name__})"


def _device_name(device: torch.device, trainer: Trainer | None) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({cpu_name()})" if device.type == "cpu" else device.type
    number = 1 if trainer is None else trainer.world_size
    return name if number == 1 else f"{number} x {name}"


def device_ids(trainer: Trainer | None) -> tuple[str, ...]:
    """Return the devices of a run as the machine tells them apart, whatever numbers this process sees."""
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
    if trainer is None or device.type in ("cpu", "mps", "meta"):
        return (device.type,)
    if device.type == "cuda":
        return tuple(f"cuda:{torch.cuda.get_device_properties(i).uuid}" for i in trainer.device_ids)
    numbers = visible_devices(device.type)
    return tuple(f"{device.type}:{numbers[i] if i < len(numbers) else i}" for i in trainer.device_ids)


def _thin(steps: list[int], most: int = 1000) -> list[int]:
    """Leave out steps by their number. Every arm then keeps the same steps, so that they can be paired."""
    stride = 1
    while len(steps) > most:
        stride *= 2
        steps = [step for step in steps if step % stride == 0]
    return steps


# -- settings of torch for the whole process ---------------------------------------------------------------------------


def process_settings() -> dict[str, Any]:
    """Return the settings of this process that change the speed or the bits of torch: threads, TF32 and others.

    A script may set them at its top, so its runs need the same settings in other processes. The states of random
    generators are not included.
    """
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "fp32_precision": [switch.fp32_precision for switch in fp32_switches()],
    }


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Set the settings of another process, if they differ from this process's own."""
    own = process_settings()
    if own["num_threads"] != settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    if own["default_dtype"] != settings["default_dtype"]:
        torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    if settings["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=settings["deterministic_warn_only"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    for switch, mine, wanted in zip(fp32_switches(), own["fp32_precision"], settings["fp32_precision"], strict=True):
        if mine != wanted:
            switch.fp32_precision = wanted


# -- unpickling --------------------------------------------------------------------------------------------------------


def _unpickle(data: bytes, header: Mapping[str, Any]) -> Task:
    """Return the task. While files are imported, `sys.argv` holds the arguments of the script, which may read them."""
    own, sys.argv = sys.argv, header["argv"]
    try:
        for name, file in header["files"].items():
            if name not in sys.modules and not can_be_found(name, file):
                _load(name, file)
        if b"__main__" in data and header["main"] is not None:
            _load_main(**header["main"])
        return pickle.loads(data)
    finally:
        sys.argv = own  # Lightning starts other ranks with these arguments


def _load(name: str, file: str) -> None:
    """Import a file under its name in the other process, where `sys.path` does not lead to it."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _load_main(name: str | None = None, path: str | None = None) -> None:
    """Import the script that called `compare_precisions`, as `multiprocessing` does: its guard stops it."""
    under = "__mp_main__"
    found = (
        runpy.run_module(name, run_name=under, alter_sys=True) if name else runpy.run_path(path or "", run_name=under)
    )
    module = ModuleType(under)
    vars(module).update(found, __spec__=None)  # so that Lightning starts ranks with `_child.py`, not with the script
    sys.modules["__main__"] = sys.modules[under] = module


# -- files for the other process ---------------------------------------------------------------------------------------


def _write(folder: Path, data: Mapping[str, Any]) -> None:
    write_atomically(folder / RESULT, lambda file: json.dump(data, file, allow_nan=False))


def _say(folder: Path, share: float | None, text: str) -> None:
    if _lightning.is_rank_zero():
        with contextlib.suppress(OSError):
            (folder / PROGRESS).write_text(json.dumps({"share": share, "text": text}), encoding="utf-8")
