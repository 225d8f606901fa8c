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

from lightning_amp.compare import HERE, Spec, run_in_process
from lightning_amp.compare._process import Server
from tests.benchmarks._pairs import start
from tests.zoo.compared import TRAINER, Sea, Waves

ROUNDS = 5


def overhead_s(folder: Path, seed: int) -> float:
    """Return the seconds of a run beside its training."""
    spec = Spec("fp32", {"precision": "fp32"}, seed, False, Waves, Sea, TRAINER, str(folder))
    began = time.perf_counter()
    run = run_in_process(spec, lambda *_: None)
    assert run.finished, run.error
    return time.perf_counter() - began - run.train_s


def main() -> None:
    start("A run of compare_precisions, beside its training")
    seconds: dict[str, list[float]] = {"a new process": [], "a fork": []}
    with tempfile.TemporaryDirectory() as name, HERE.forking():
        folder = Path(name)
        first = overhead_s(folder / "first", 0)
        for number in range(ROUNDS):
            with patch.object(Server, "fork", lambda *_: False):
                seconds["a new process"].append(overhead_s(folder / f"new{number}", number))
            seconds["a fork"].append(overhead_s(folder / f"fork{number}", number))
    print(f"the first run, which starts the warm process: {first:.2f} s")
    for kind, values in seconds.items():
        print(f"{kind}: {statistics.median(values):.2f} s (from {min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
