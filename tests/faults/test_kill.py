"""A small version of `make faults`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])}


def test_nothing_is_lost() -> None:
    command = [sys.executable, str(HERE / "kill.py"), "--kills", "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"Survived 3 kills, .* runs came to their end and were compared", done.stdout)
    assert done.stdout.endswith("Lost: nothing.\n")
