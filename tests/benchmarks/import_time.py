"""Time the import of all public names against importing lightning.pytorch: `python -m tests.benchmarks.import_time`."""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks._pairs import report, start, time_pairs


def main() -> None:
    start("Import: all of lightning_amp against lightning.pytorch, each in a fresh interpreter")
    run = [sys.executable, "-c"]
    ours, theirs = time_pairs(
        lambda: subprocess.run([*run, "from lightning_amp import *"], check=True),
        lambda: subprocess.run([*run, "import lightning.pytorch"], check=True),
        pairs=5,
    )
    report("from lightning_amp import *", ours, theirs, target=">= 0.91 (costs less than 10 %)")


if __name__ == "__main__":
    main()
