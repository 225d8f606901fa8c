"""Time what a run of a comparison costs beside its training: `python -m tests.benchmarks.compare_overhead`.

Each round trains the same arm once in a new process and once in a fork of a warm process, on an otherwise idle machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from lightning_amp.compare import Task, parse_arms, run_in_process
from lightning_amp.compare._fork_server import FORK_SERVER, ForkServer
from tests.benchmarks._pairs import start
from tests.zoo.compared import TRAINER, Sea, Waves

ROUNDS = 5


def overhead_s(folder: Path, seed: int) -> tuple[float, float]:
    """Return the seconds of a run beside its training, and those of the training."""
    task = Task("fp32", seed, parse_arms(["fp32"])["fp32"], False, Waves, Sea, TRAINER, str(folder))
    began = time.perf_counter()
    run = run_in_process(task, lambda *_: None)
    assert run.finished, run.error
    return time.perf_counter() - began - run.train_s, run.train_s


def main() -> None:
    start("A run of compare_precisions, beside its training")
    seconds: dict[str, list[float]] = {"a new process": [], "a fork": []}
    with tempfile.TemporaryDirectory() as name, FORK_SERVER.warm():
        folder = Path(name)
        first, _ = overhead_s(folder / "first", 0)
        for number in range(ROUNDS):
            with patch.object(ForkServer, "fork", lambda *_: None):
                seconds["a new process"].append(overhead_s(folder / f"new{number}", number)[0])
            seconds["a fork"].append(overhead_s(folder / f"fork{number}", number)[0])
    print(f"the first run, which starts the warm process: {first:.2f} s")
    for kind, values in seconds.items():
        print(f"{kind}: {statistics.median(values):.2f} s (from {min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
