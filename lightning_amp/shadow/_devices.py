"""Which device Lightning would train on, and which accelerator of Lightning trains on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from lightning_amp.shadow._unnoticed import unnoticed


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
    """Return what the `accelerator` of a Trainer on this device has to be.

    Args:
        device: Where it is going to train.
        trainer_kwargs: Of the user's own Trainer, which may have an accelerator that Lightning does not bring.

    Raises:
        ValueError: If Lightning knows nothing of this type of device, nor does the user's accelerator.

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
