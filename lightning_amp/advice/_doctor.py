"""`doctor`: what this machine can do, and why a module is not faster in mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_amp._arguments import require
from lightning_amp.advice._examine_machine import examine
from lightning_amp.advice._examine_step import StepExamination
from lightning_amp.advice._progress import Progress
from lightning_amp.advice._report import DoctorReport
from lightning_amp.casting import Choice, our_name
from lightning_amp.comparison import ArmSpec, check_trainer_names, parse_arms
from lightning_amp.shadow import device_of_trainer, unnoticed


def doctor(
    make_module: Callable[[], LightningModule] | None = None,
    make_data: Callable[[], LightningDataModule] | None = None,
    *,
    precision: Any = "auto",
    trainer_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> DoctorReport:
    """Measure what this machine can do and, with a module, say why mixed precision is not faster or saves no memory.

    .. code-block:: python

        from models import Model, Data  # your LightningModule and LightningDataModule

        print(doctor())  # the machine
        report = doctor(Model, Data, precision="bf16")
        print(report)
        print(report.findings[0].code, report.findings[0].action)

    The machine: matrix products of several sizes and 3x3 convolutions in each precision, in turns; what is native,
    emulated or missing; TF32; known traps of the versions that are installed; which precision to use, or "undecided".

    The module trains for some steps, as a copy, by a Trainer of its own, in this process: one step is recorded
    operation by operation, others are timed, and then timed again in turns with one thing changed (fp32,
    `fused=True`, channels_last, without `fp32_modules`, a larger batch), so that what is advised was tried. Nothing is
    written, and the module, the random generators and the settings of the process stay as they were. One device is
    looked at, whatever the strategy. What `torch.compile` compiled is timed compiled and recorded eagerly. A step that
    takes too long for rounds is reported from one run of each precision.

    Args:
        make_module: Returns the LightningModule: its class, or a function without arguments. It need not be new.
        make_data: Likewise for a LightningDataModule; `None` if the module has a `train_dataloader` of its own.
        precision: What is looked at: a name, a plugin, or the arguments of :class:`AmpPrecision` as a mapping.
        trainer_kwargs: Arguments of the Trainer, without `precision` and `plugins`. Callbacks run as copies; loggers,
            checkpoints and what says how long to train are left out.
        device: Where; default: the first device that Lightning would train on, `trainer_kwargs["accelerator"]` and
            `trainer_kwargs["devices"]` included.

    Returns:
        The findings, worst first, with all that was measured.

    Raises:
        ValueError: If an argument is wrong, if the device cannot run the precision, if there is no training batch.
        TypeError: If a factory returns something else.
        Exception: What the user's own code raises.

    Cost: 5 to 30 s for the machine; at most a minute for a module, beside what its own steps take (about 150). One copy
    of the module for each thing that is tried, up to six; all but the one that trains are on the host. One that does
    not fit is left out, and said.

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
    with unnoticed(where), Progress() as say:
        say(f"timing products and convolutions on {where}")
        machine = examine(where, short=make_module is not None)
        if make_module is None:
            return DoctorReport(machine, None, name)
        step = StepExamination(make_module, make_data, arm, machine, where, kwargs, say).run()
        return DoctorReport(machine, step, step.precision)


def _arm(precision: Any) -> ArmSpec:
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
    """Return our name of a precision; of one that is not ours, Lightning's."""
    if isinstance(source, Mapping):
        given = our_name(source.get("precision", "auto"))
        return Choice.pick(device)[0].name if given == "auto" else given
    return our_name(source.precision)
