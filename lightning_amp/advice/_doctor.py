"""`doctor`: measure what this machine can do, and explain why a module is not faster in mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lightning_amp._arguments import require
from lightning_amp._compat._names import LightningDataModule, LightningModule
from lightning_amp._text import literal
from lightning_amp.advice._machine import compare, examine, product_of, timed
from lightning_amp.advice._race import Contestant, Track, race
from lightning_amp.advice._report import DoctorReport
from lightning_amp.advice._step import (
    AS_IT_IS,
    CHANNELS_LAST,
    DATA,
    FUSED,
    IN_FP32,
    OPTIMIZER,
    Step,
    Unaligned,
)
from lightning_amp.advice._watch import Watch
from lightning_amp.advice.findings._products import unaligned_products
from lightning_amp.casting import Choice, our_name
from lightning_amp.compare import Progress, Spec, check_factory, check_trainer_names, make_arm
from lightning_amp.precision import AmpPrecision
from lightning_amp.shadow import (
    Batches,
    device_of_trainer,
    own_data,
    own_module,
    private_trainer,
    require_unsharded,
    run_private_fit,
    unnoticed,
)
from lightning_amp.tracing import RandomState, paired_random


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

    The machine part times matrix products of several sizes in each precision, in turns. It reports which precisions are
    native, emulated or missing, whether TF32 is on, and known faults of the installed versions. It recommends a
    precision, or says "undecided".

    The module part trains a copy of the module for some steps, in this process, by a Trainer of its own. One step is
    recorded operation by operation, and others are timed. Then steps are timed in turns, each with one setting changed
    (fp32, `fused=True`, channels_last). Advice that was not tried says so. Nothing is written.
    The module, the random generators and the settings of the process do not change. One device is examined, whatever
    the strategy. Code compiled by `torch.compile` is timed compiled and recorded eagerly. If a step takes too long for
    several rounds, the report is made from one run of each precision.

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

    Cost: 5 to 30 s for the machine. For a module, at most a minute in addition to its own steps (30 to 350). Each
    variant needs a copy of the module, up to four in all, and only the one that trains is on the device. A variant that
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
    made = ("make_module", make_module, LightningModule), ("make_data", make_data, LightningDataModule)
    for name, factory, kind in made:
        if factory is not None:
            check_factory(name, factory, kind, travels=False)
    arm = make_arm("precision", "precision", precision)
    where = _device(device, kwargs)
    given = our_name(arm.source.get("precision", "auto") if isinstance(arm.source, Mapping) else arm.source.precision)
    with unnoticed(where), Progress(1) as shown:
        say = shown.set_description
        if make_module is not None:
            require_unsharded(make_module, "doctor")
        say(f"timing products on {where}")
        machine = examine(where, short=make_module is not None)
        if make_module is None:
            return DoctorReport(machine, None, Choice.pick(where)[0].name if given == "auto" else given)
        return DoctorReport(machine, _examine_step(make_module, make_data, arm, where, kwargs, say))


def _examine_step(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule] | None,
    arm: Spec,
    device: torch.device,
    trainer_kwargs: Mapping[str, Any],
    say: Callable[[str], None],
) -> Step:
    """Watch a fit, time variants of its step, and return the record; `say` is called with the progress."""
    start = RandomState.capture(device.type)

    def own() -> LightningModule:
        with paired_random(device.type, start):  # a factory may choose the depth of its network at random
            return own_module(make_module)

    with ExitStack() as stack:
        data = stack.enter_context(own_data(make_data)) if make_data is not None else None
        module, plugin, watch = own(), arm.plugin(), Watch(device, __file__)
        say("training some steps")
        step = _watched_fit(watch, private_trainer(device, plugin, [watch], trainer_kwargs), module, data)
        step = replace(step, plugin=arm.description)
        if not step.parts:  # the loss scale does not settle: no time means anything
            return step
        contestants = list(_contestants(step, module, plugin, arm, own))
        kwargs = {**trainer_kwargs, "accumulate_grad_batches": 1} if module.automatic_optimization else trainer_kwargs
        track = Track(device, kwargs, Batches(watch.batches, watch.loader), data)
        known_s = sum(seconds for part, seconds in step.parts.items() if part != DATA)
        variants = race(contestants, track, known_s=known_s, say=say)
    fp32 = next((contestant.record for contestant in contestants if contestant.label == IN_FP32), None)
    return replace(
        step,
        fp32_recorded=fp32.recorded if fp32 else None,
        fp32_memory=fp32.memory if fp32 else None,
        unaligned=_unaligned(step, device),
        variants=variants,
    )


def _watched_fit(watch: Watch, trainer: Any, module: LightningModule, data: LightningDataModule | None) -> Step:
    """Train for some steps, and return their record.

    Raises:
        ValueError: If there were too few batches.

    """
    no_batch = "The training loader gave no batch. Check its dataset, `limit_train_batches` and `drop_last`."
    try:
        run_private_fit(trainer, module, data)
    except Exception as error:
        if not watch.batches and trainer.num_training_batches == 0:  # such as a schedule over zero steps
            raise ValueError(no_batch) from error
        raise
    if watch.step is None:
        raise ValueError("Training stopped by itself before a step could be recorded." if watch.batches else no_batch)
    return watch.step


def _contestants(
    step: Step, module: LightningModule, plugin: Any, arm: Spec, own: Callable[[], LightningModule]
) -> Iterator[Contestant]:
    """Yield the unchanged step, the step in fp32, and the step with each change that may help."""
    yield Contestant(AS_IT_IS, lambda: (module, plugin), made=(module, plugin))
    if step.precision != "fp32":
        yield Contestant(IN_FP32, lambda: (own(), AmpPrecision("fp32")), is_watched=True)
    if any(optimizer.can_fuse for optimizer in step.optimizers) and step.share(OPTIMIZER) > 0.03:
        yield Contestant(FUSED, lambda: (own(), arm.plugin()))
    recorded, layout = step.recorded, {"memory_format": torch.channels_last}
    if recorded.convolution_flops > 0.1 * recorded.forward_flops and not recorded.channels_last:
        yield Contestant(CHANNELS_LAST, lambda: (own().to(**layout), arm.plugin()))  # type: ignore[call-overload]


def _unaligned(step: Step, device: torch.device) -> Unaligned | None:
    """Return the products whose sizes are not aligned, with the speed of the largest one if it is padded.

    In fp8, products of other sizes do not run in fp8 at all, so there is no time to compare with.
    """
    found = unaligned_products(step)
    if found is None or step.precision == "fp8":
        return found
    calls = {str(sizes): product_of(found.format, sizes, device) for sizes in (found.sizes, found.padded)}
    own_s, padded_s = timed(calls, most_s=0.2).values()
    return replace(found, padded_speed=compare(padded_s, own_s))


def _device(device: torch.device | str | None, kwargs: Mapping[str, Any]) -> torch.device:
    if device is None:
        return device_of_trainer(kwargs)
    try:
        return torch.empty(0, device=device).device
    except Exception as error:
        rule = "a device of this machine, such as 'cpu' or 'cuda:0'"
        raise ValueError(f"`device` must be {rule}, got {literal(device)} ({error}).".replace("\n", " ")) from error
