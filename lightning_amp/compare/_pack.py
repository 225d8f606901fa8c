"""Pack a training so that another process, here or on another machine, can run it."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from lightning_amp.compare._factories import main_module, source_files
from lightning_amp.compare._fork_server import FORK_SERVER
from lightning_amp.compare._process import OnProgress, PackedTask, run_packed
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._worker import Task, process_settings


def pack(task: Task, dumps: Any = pickle.dumps) -> PackedTask:
    """Return a task as bytes, with the settings of this process.

    Args:
        task: The training.
        dumps: `pickle.dumps`, or `cloudpickle.dumps` for factories that cannot be imported by their names.

    """
    origin = {
        "path": [entry or os.getcwd() for entry in sys.path],
        "main": main_module(),
        "files": source_files(task.make_module, task.make_data),
        "argv": sys.argv,
        "settings": process_settings(),
    }
    kwargs = task.trainer_kwargs
    # `devices="auto"` may be several, but then Lightning starts all other ranks as new processes
    alone = kwargs.get("strategy", "auto") == "auto" and kwargs.get("devices", "auto") in ("auto", 1, "1")
    return PackedTask(task.label, task.seed, dumps(task), origin, alone and kwargs.get("num_nodes", 1) == 1)


def run_in_process(task: Task, on_progress: OnProgress) -> ArmRun:
    """Run a task in a process of its own on this machine: see :func:`run_packed`."""
    with FORK_SERVER.warm():
        return run_packed(pack(task), task.work_folder, on_progress)
