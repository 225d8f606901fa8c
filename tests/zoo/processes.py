"""Modules that look at the process of a run, or end it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_amp.compare import _train
from zoo.compared import Waves

MOMENTS = ("making the module", "training", "after training", "writing")
"""Moments in which the process of :class:`Dies` is killed: one for each seed, from 0 on."""


class Facts(Waves):
    """Writes facts about its process into the file `$FACTS`."""

    def __init__(self) -> None:
        super().__init__()
        sys.stdout.write("a line for the log\n")
        facts = {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            # without the folder that torch 2.9 makes for its own modules, with another name in each process
            "path": [p for p in sys.path if not p.startswith(f"{tempfile.gettempdir()}/tmp")],
            "num_arguments": len(sys.argv),
            "threads": torch.get_num_threads(),
            "cores": sorted(os.sched_getaffinity(0)),
            "leads its session": os.getsid(0) == os.getpid(),
            "stdin": os.readlink("/proc/self/fd/0"),
            "output": os.readlink("/proc/self/fd/1"),
            "errors": os.readlink("/proc/self/fd/2"),
            "temporary": tempfile.gettempdir(),
            "parent": os.getppid(),
        }
        Path(os.environ["FACTS"]).write_text(json.dumps(facts))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Dies(Waves):
    """Is killed in the moment that its seed chooses."""

    def __init__(self) -> None:
        super().__init__()
        sys.stdout.write("a line of the user's own\n")
        sys.stdout.flush()
        self.moment = MOMENTS[torch.initial_seed()]
        if self.moment == "making the module":
            _die()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.moment == "training" and batch_idx == 5:
            _die()
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        if self.moment == "after training":
            _die()
        if self.moment == "writing":
            _train.write_atomically = _write_half  # type: ignore[assignment]


def _write_half(path: Path, _: Any) -> None:
    path.write_text('{"label": "fp32", "seed"')
    _die()
