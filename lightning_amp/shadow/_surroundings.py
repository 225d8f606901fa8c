"""Leaves the process as it was before a private fit, and finds the device that Lightning would train on."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from lightning_amp.tracing import fp32_switches, paired_random

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_amp")


@contextmanager
def unnoticed(device: torch.device) -> Generator[None]:
    """Leave the caller's process as it was found: random generators, seed of Lightning, settings of torch, loggers.

    Inside, Lightning and this package say nothing, warnings are not shown, and `device` is the current one.
    """
    environment = dict(os.environ)
    precisions = [(switch, switch.fp32_precision) for switch in fp32_switches()]
    matmul = _matmul_precision()
    anomaly, cudnn = torch.is_anomaly_enabled(), torch.backends.cudnn.deterministic
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    threads, dtype, benchmark = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(), paired_random(device.type), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
                yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if matmul is not None and _matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        for switch, precision in precisions:
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
        torch.autograd.set_detect_anomaly(anomaly)
        torch.backends.cudnn.deterministic = cudnn
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _matmul_precision() -> str | None:
    """Return what `set_float32_matmul_precision` set; torch does not tell where a newer switch was used as well."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def device_of_trainer(trainer_kwargs: Mapping[str, Any]) -> torch.device:
    """Return the first device that Lightning would train on.

    Args:
        trainer_kwargs: Arguments of its Trainer, of which `accelerator` and `devices` count.

    Raises:
        ValueError: If there is no such device here.

    """
    devices = trainer_kwargs.get("devices", "auto")
    try:
        accelerator = _accelerator_of_trainer(trainer_kwargs)
        return _first_device(accelerator, accelerator.auto_device_count() if devices == "auto" else devices)
    except Exception as error:
        asked = {name: trainer_kwargs[name] for name in ("accelerator", "devices") if name in trainer_kwargs}
        raise ValueError(f"`trainer_kwargs` asks for {asked}, which this machine has not: {error}") from error


def accelerator_for(device: torch.device, trainer_kwargs: Mapping[str, Any]) -> str | Accelerator:
    """Return the `accelerator` of a Trainer on this device, or refuse a device that Lightning does not know."""
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
