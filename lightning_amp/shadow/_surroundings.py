"""Restore the process after a private fit, and find the device on which Lightning would train."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch

from lightning_amp._compat._names import Accelerator, AcceleratorRegistry, Trainer
from lightning_amp.tracing import fp32_switches, paired_random

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "lightning_amp")


@contextmanager
def unnoticed(device: torch.device) -> Generator[None]:
    """Restore the caller's process at the end: random generators, environment, settings of torch, loggers.

    Inside, Lightning and this package log nothing, warnings are not shown, and `device` is the current device.
    """
    cudnn: Any = torch.backends.cudnn
    with ExitStack() as restored:
        for switch in fp32_switches():
            restored.callback(_restore_switch, switch, switch.fp32_precision)
        with suppress(RuntimeError):  # of torch, if a newer switch was used
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        restored.enter_context(mock.patch.dict(os.environ))
        restored.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        restored.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        restored.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        restored.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        for logger in map(logging.getLogger, _LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), paired_random(device.type), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
                yield


def _restore_switch(switch: Any, precision: str) -> None:
    if switch.fp32_precision != precision:  # writing a value would end the inheritance of a switch
        switch.fp32_precision = precision


def device_of_trainer(trainer_kwargs: Mapping[str, Any]) -> torch.device:
    """Return the first device on which a Trainer with these arguments would train.

    Raises:
        ValueError: If this machine has no such device.

    """
    devices = trainer_kwargs.get("devices", "auto")
    try:
        accelerator = _accelerator_of_trainer(trainer_kwargs)
        return _first_device(accelerator, accelerator.auto_device_count() if devices == "auto" else devices)
    except Exception as error:
        asked = {name: trainer_kwargs[name] for name in ("accelerator", "devices") if name in trainer_kwargs}
        raise ValueError(f"`trainer_kwargs` asks for {asked}, which this machine has not: {error}") from error


def accelerator_for(device: torch.device, trainer_kwargs: Mapping[str, Any]) -> str | Accelerator:
    """Return the `accelerator` argument of a Trainer on this device.

    Raises:
        ValueError: If Lightning does not support the device, and the accelerator in `trainer_kwargs` is for another
            one.

    """
    if device.type in AcceleratorRegistry:
        return device.type
    theirs = _accelerator_of_trainer(trainer_kwargs)
    if _first_device(theirs, 1).type != device.type:
        raise ValueError(
            f"Lightning has no accelerator for {device.type!r}. Pass the one that you train with:"
            " `trainer_kwargs={'accelerator': ...}`."
        )
    return theirs


def _accelerator_of_trainer(trainer_kwargs: Mapping[str, Any]) -> Accelerator:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with unnoticed(torch.device("cpu")):
        return Trainer(accelerator=trainer_kwargs.get("accelerator", "auto"), devices=1, **settings).accelerator


def _first_device(accelerator: Any, devices: Any) -> torch.device:
    return accelerator.get_parallel_devices(accelerator.parse_devices(devices))[0]
