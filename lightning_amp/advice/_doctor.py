"""`doctor`: measure what this machine can do, and explain why a module is not faster in mixed precision."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp._arguments import require
from lightning_amp.advice._examine_machine import examine
from lightning_amp.advice._examine_step import examine_step
from lightning_amp.advice._report import DoctorReport
from lightning_amp.casting import Choice, our_name
from lightning_amp.compare import Spec, check_trainer_names, parse_arms
from lightning_amp.shadow import device_of_trainer, require_unsharded, unnoticed


def doctor(
    make_module: Callable[[], LightningModule] | None = None,
    make_data: Callable[[], LightningDataModule] | None = None,
    *,
    precision: Any = "auto",
    trainer_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> DoctorReport:
    """Measure what this machine can do.

    With a module, also explain why mixed precision is not faster or saves no memory.

    .. code-block:: python

        from models import Model, Data  # your LightningModule and LightningDataModule

        print(doctor())  # the machine
        report = doctor(Model, Data, precision="bf16")
        print(report)
        print(report.findings[0].code, report.findings[0].action)

    The machine part times matrix products of several sizes and 3x3 convolutions in each precision, in turns. It reports
    which precisions are native, emulated or missing, whether TF32 is on, and known faults of the installed versions. It
    recommends a precision, or says "undecided".

    The module part trains a copy of the module for some steps, in this process, by a Trainer of its own. One step is
    recorded operation by operation, and others are timed. Then steps are timed in turns, each with one setting changed
    (fp32, `fused=True`, channels_last, without `fp32_modules`, a larger batch), so every piece of advice was tried.
    Nothing is written. The module, the random generators and the settings of the process do not change. One device
    is examined, whatever the strategy. Code compiled by `torch.compile` is timed compiled and recorded eagerly. If a
    step takes too long for several rounds, the report is made from one run of each precision.

    Args:
        make_module: Returns the LightningModule: its class, or a function without arguments. It need not be new.
        make_data: Returns the LightningDataModule; `None` if the module has a `train_dataloader` of its own.
        precision: The precision to examine: a name, a plugin, or the arguments of :class:`AmpPrecision` as a mapping.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. Callbacks run as copies. Loggers,
            checkpoints and arguments that limit the length of training are left out.
        device: The device to examine. Default: the first device on which Lightning would train, according to
            `trainer_kwargs["accelerator"]` and `trainer_kwargs["devices"]`.

    Returns:
        The findings, worst first, with all measurements.

    Raises:
        ValueError: If an argument is wrong, if the device cannot run the precision, or if there is no training batch.
        TypeError: If a factory returns an object of another type.
        Exception: Any exception of the user's own code.

    Cost: 5 to 30 s for the machine. For a module, at most a minute in addition to its own steps (about 150). Each
    variant needs a copy of the module, up to six in all, and only the one that trains is on the device. A variant that
    does not fit into memory is left out, and the report mentions it.

    """
    require(
        make_data is None or make_module is not None,
        "make_data",
        "passed together with `make_module`",
        make_data,
        "Without a module the doctor looks at the machine alone.",
    )
    kwargs = check_trainer_names(trainer_kwargs, "looked at", "Pass it as `precision=`.")
    for name, factory in (("make_module", make_module), ("make_data", make_data)):
        rule = "callable without arguments: a class, or a function"
        made = isinstance(factory, (LightningModule, LightningDataModule))
        require(factory is None or (callable(factory) and not made), name, rule, factory, "Write `lambda: ...`.")
    arm = _arm(precision)
    where = _device(device, kwargs)
    name = _name(arm.source, where)
    with unnoticed(where), progress() as say:
        if make_module is not None:
            require_unsharded(make_module, "doctor")
        say(f"timing products and convolutions on {where}")
        machine = examine(where, short=make_module is not None)
        if make_module is None:
            return DoctorReport(machine, None, name)
        step = examine_step(make_module, make_data, arm, machine, where, kwargs, say)
        return DoctorReport(machine, step, step.precision)


def _arm(precision: Any) -> Spec:
    try:
        return parse_arms({"precision": precision})["precision"]
    except ValueError as error:
        raise ValueError(str(error).replace("`precisions['precision']`", "`precision`")) from error


def _device(device: torch.device | str | None, kwargs: Mapping[str, Any]) -> torch.device:
    if device is None:
        return device_of_trainer(kwargs)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"`device` must be a device such as 'cpu' or 'cuda:0', got {device!r}.") from error
    if found.type == "cpu":
        return found
    here = torch.accelerator.current_accelerator(True)
    if here is None or here.type != found.type:
        name = found.type.upper()
        raise ValueError(f"`device` is {device!r}, and there is no {name} device here. Pass 'cpu', or nothing.")
    return found if ":" in str(found) else torch.device(found.type, torch.accelerator.current_device_index())


def _name(source: Any, device: torch.device) -> str:
    """Return our name for a precision, which may be given as a Lightning plugin."""
    if isinstance(source, Mapping):
        given = our_name(source.get("precision", "auto"))
        return Choice.pick(device)[0].name if given == "auto" else given
    return our_name(source.precision)


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows its text in one line on the terminal; erase the line at the end."""
    stream, began_s, width = sys.stderr, time.perf_counter(), 0

    def say(text: str) -> None:
        nonlocal width
        if stream is not None and stream.isatty():
            line = f"doctor: {text} ({time.perf_counter() - began_s:.0f} s)"[:79]
            stream.write(f"\r{line:<{width}}")
            stream.flush()
            width = len(line)

    try:
        yield say
    finally:
        if width:
            stream.write(f"\r{'':<{width}}\r")
            stream.flush()
