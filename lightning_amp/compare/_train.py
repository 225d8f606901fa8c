"""Train one arm with one seed, in a process of its own, and write its record to a file."""

from __future__ import annotations

import contextlib
import gc
import json
import pickle
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from typing_extensions import final, override

from lightning_amp._compat import _lightning
from lightning_amp._compat._names import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    require_kind,
    seed_everything,
)
from lightning_amp._cpu_name import cpu_name
from lightning_amp._files import write_atomically
from lightning_amp.callbacks import MetricComparison, ScaleMonitor
from lightning_amp.casting import our_name
from lightning_amp.compare._local_devices import visible_devices
from lightning_amp.compare._observer import Observer
from lightning_amp.compare._process import RESULT
from lightning_amp.compare._run import Point, Run, to_data
from lightning_amp.compare._spec import Spec, apply_settings, versions
from lightning_amp.precision import AmpPrecision
from lightning_amp.reports import ScaleHistory
from lightning_amp.tracing import reduces_fp32


def main(folder: str, header: Mapping[str, Any], started: float) -> None:
    """Train, and write the record of the run into `folder`.

    Args:
        folder: Gets the record.
        header: The result of :func:`~lightning_amp.compare._spec.pack`.
        started: The time at which the process began, as `time.time()`.

    """
    apply_settings(header["settings"])
    spec: Spec = pickle.loads(header["spec"])
    _name_what_came_by_value()
    run = train(spec, started, header["folder"])
    if _lightning.is_rank_zero():
        write_atomically(Path(folder) / RESULT, lambda file: json.dump(to_data(run), file, allow_nan=False))


def _name_what_came_by_value() -> None:
    """Let the classes of the user's script be found by their names, as `pickle` does when a checkpoint is saved."""
    main = vars(sys.modules["__main__"])
    for thing in gc.get_objects():
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__":
            main.setdefault(thing.__name__, thing)


def train(spec: Spec, started: float, work_folder: str = "") -> Run:
    """Train as a user would by hand, and return the record of the run."""
    observer = Observer(spec.margins)
    trainer: Trainer | None = None
    error: str | None = None
    try:
        seed_everything(spec.seed, verbose=False)
        module = _made(spec.make_module, "make_module", LightningModule)
        data = _made(spec.make_data, "make_data", LightningDataModule)
        trainer = _trainer(spec, observer, work_folder or spec.folder)
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
        error = "\n".join([f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", ())])
    return _sum_up(spec, observer, trainer, {"error": error, "total_s": time.time() - started})


def _made(factory: Any, argument: str, kind: type) -> Any:
    made = factory()
    require_kind(made)
    if not isinstance(made, kind):
        raise TypeError(f"`{argument}` must return a {kind.__name__}; it returned {type(made).__name__}.")
    return made


def _trainer(spec: Spec, observer: Observer, folder: str) -> Trainer:
    kwargs = dict(spec.trainer_kwargs)
    given = kwargs.pop("callbacks", None) or []
    callbacks = [given] if isinstance(given, Callback) else list(given)
    if not any(isinstance(callback, ScaleMonitor) for callback in callbacks):
        callbacks.append(ScaleMonitor())
    callbacks.append(observer)
    if spec.moved:
        callbacks.append(LastBitMover(spec.seed))
    kwargs: dict[str, Any] = {"default_root_dir": folder, "enable_progress_bar": False, **kwargs}
    return Trainer(**kwargs, callbacks=callbacks, plugins=[spec.plugin(kwargs.get("strategy", "auto"))])


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


def _sum_up(spec: Spec, observer: Observer, trainer: Trainer | None, ending: Mapping[str, Any]) -> Run:
    watch = observer.watch
    elapsed = watch.elapsed_s()
    monitor, comparison = _callback(trainer, ScaleMonitor), _callback(trainer, MetricComparison)
    history = ScaleHistory() if monitor is None else monitor.history
    plugin = None if trainer is None else trainer.strategy.precision_plugin
    applied = 0 if trainer is None else trainer.global_step
    # every arm keeps the same steps, so that they can be paired
    steady = watch.steady()
    steps = [step for step in steady if step % (1 + len(steady) // 1000) == 0]

    def points(values: list[tuple[int, float]]) -> tuple[Point, ...]:
        return tuple(Point(step, elapsed[min(step, len(elapsed) - 1)], value) for step, value in values)

    return Run(
        label=spec.label,
        seed=spec.seed,
        **ending,
        precision=_precision(plugin, history),
        device=_device_name(observer.device, trainer),
        devices=_device_ids(trainer),
        num_threads=torch.get_num_threads(),
        tf32=reduces_fp32(observer.device.type),
        versions={**versions(), "torch": str(torch.__version__), "Python": platform.python_version()},
        curves={name: points(values) for name, values in observer.curves.items()},
        last_validation=observer.last_validation,
        directions=observer.directions,
        loss=points(observer.losses()),
        same_weights={row.metric: (row.amp, row.fp32) for row in ([] if comparison is None else comparison.table.last)},
        step_s=tuple(watch.step_s(steps)),
        timed_steps=tuple(steps),
        samples_per_s=tuple(watch.samples_per_s(steps)),
        train_s=elapsed[-1],
        peak_memory_bytes=observer.peak_memory_bytes,
        memory_of=observer.memory_of if observer.peak_memory_bytes is not None else None,
        num_steps=applied if history.last is None else history.num_steps,
        num_skipped=history.num_skipped,
        scale=tuple(history) if isinstance(getattr(plugin, "scaler", None), torch.amp.GradScaler) else (),
        matmul_flops=observer.matmul_flops,
    )


def _callback(trainer: Trainer | None, kind: Any) -> Any:
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _precision(plugin: Any, history: ScaleHistory) -> str:
    """Return our name for the precision, or Lightning's name under other plugins."""
    if isinstance(plugin, AmpPrecision):  # the record of a step knows fp8, for which Lightning has the name of bf16
        return (history.last is not None and history.last.precision) or our_name(plugin.precision)
    return "" if plugin is None else f"{plugin.precision} ({type(plugin).__name__})"


def _device_name(device: torch.device, trainer: Trainer | None) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({cpu_name()})" if device.type == "cpu" else device.type
    number = 1 if trainer is None else trainer.world_size
    return name if number == 1 else f"{number} x {name}"


def _device_ids(trainer: Trainer | None) -> tuple[str, ...]:
    """Return the devices of a run as the machine tells them apart, whatever numbers this process sees."""
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
    if trainer is None or device.type in ("cpu", "mps", "meta"):
        return (device.type,)
    if device.type == "cuda":
        return tuple(f"cuda:{torch.cuda.get_device_properties(i).uuid}" for i in trainer.device_ids)
    names = visible_devices(device.type)
    return tuple(f"{device.type}:{names[i] if i < len(names) else i}" for i in trainer.device_ids)


# -- the control -------------------------------------------------------------------------------------------------------


@final
class LastBitMover(Callback):
    """Moves the initial weights when training starts, after the module was made, loaded and compiled."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not move_last_bits(pl_module, self._seed):
            rule = "The control needs trainable parameters in float32, float64 or bfloat16; the module has none."
            raise ValueError(f"{rule} Pass `control=False`.")


@torch.no_grad()
def move_last_bits(module: nn.Module, seed: int) -> int:
    """Move each value of each trainable parameter in place to the next larger or smaller number, at random by `seed`.

    Such a run shows the run-to-run noise: the least difference between two runs of the reference. In a short, stable
    training the noise is far smaller than the rounding of another precision. The loss of the digits differs by 1e-8
    after four epochs, and by 2e-5 in bf16. The noise grows if training amplifies small changes. A precision that
    differs no more than the control cannot be distinguished from the reference. The control does the same work as the
    reference, so its speed should be the same.

    The random numbers come from a generator of its own, so that the run draws the same numbers as the reference. A
    value of 0 becomes the smallest number of the format. Parameters in float16 stay, because `torch.nextafter` does not
    support it.

    Returns:
        The number of values that were moved.

    """
    generator, count = torch.Generator().manual_seed(seed), 0
    for parameter in module.parameters():
        values: Any = parameter.detach()
        values = values.to_local() if hasattr(values, "to_local") else values
        values = torch.view_as_real(values) if values.is_complex() else values
        can_move = not values.is_meta and values.dtype in (torch.float32, torch.float64, torch.bfloat16)
        if parameter.requires_grad and can_move:
            up = torch.randint(0, 2, values.shape, generator=generator).to(values.device).bool()
            infinity = torch.full((), torch.inf, dtype=values.dtype, device=values.device)
            values.copy_(torch.nextafter(values, torch.where(up, infinity, -infinity)))
            count += values.numel()
    return count
