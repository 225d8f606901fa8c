"""Run a script once per rank, in gloo processes of their own, and wait for all of them."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support import warm

ROOT = Path(__file__).parents[2]


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return the folder of this name, which all workers of a test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def launch_once(script: Path, world_size: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Do what :func:`launch` does, on one worker only. The others wait, and read its files from the shared folder."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".done")
        if not done.exists():
            launch(script, world_size, folder, *arguments)
            done.touch()
    return read(folder, world_size)


def read(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return the files that the ranks have saved."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def launch(
    script: Path, world_size: int, folder: Path, *arguments: str, timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Run the ranks with `folder` as the first argument. Return the `rank{rank}.pt` that each rank saved there."""
    run_ranks(script, world_size, folder, *arguments, timeout_s=timeout_s)
    return read(folder, world_size)


def run_ranks(script: Path, world_size: int, *arguments: str | Path, timeout_s: float = 240) -> None:
    """Run `script ARGUMENTS...` on every rank, and kill all processes after `timeout_s`.

    The script ends with `torch.distributed.destroy_process_group()`. If a rank fails, the `AssertionError` has the end
    of the output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        processes = [
            warm.start(
                script, *arguments, out=printed, err=printed, order=rank % 2,
                env={**common, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            )
            for rank in range(world_size)
        ]  # fmt: skip
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.poll() is None for p in processes):
                if time.monotonic() > deadline or any(p.poll() for p in processes):  # others would wait for it
                    break
                time.sleep(0.05)
        finally:
            codes = [p.poll() for p in processes]
            for process in processes:
                process.kill()
                process.wait()
        text = printed.read_text(encoding="utf-8", errors="replace")
        assert codes == [0] * world_size, f"exit codes {codes}\n{text[-6000:]}"
