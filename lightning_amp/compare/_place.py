"""Where the process of a run computes, if it does not have the whole machine to itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from typing_extensions import final

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable by which a process sees some devices of a type only, numbered from 0 on."""


def visible_devices(device_type: str) -> list[str]:
    """Return the devices that the environment names for this process; empty if it names none."""
    text = os.environ.get(VISIBLE.get(device_type, ""), "")
    return [name.strip() for name in text.split(",") if name.strip()]


@final
@dataclass(frozen=True)
class Place:
    """A part of this machine.

    Attributes:
        environment: Variables that select devices: `{"CUDA_VISIBLE_DEVICES": "3"}`.
        cores: Numbers of the CPU cores; empty: all that this process may use.
        stop: When it is set, the process of the run is killed.

    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    stop: threading.Event = field(default_factory=threading.Event)


WHOLE_MACHINE = Place()

assigned: ContextVar[Place] = ContextVar("assigned", default=WHOLE_MACHINE)
"""The place of a run that this thread starts."""
