"""Run a small version of `make faults`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support import warm

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def test_nothing_is_lost() -> None:
    done = warm.run_script(HERE / "kill.py", "--kills", "3", env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"Survived 3 kills, .* runs came to their end and were compared", done.stdout)
    assert done.stdout.endswith("Lost: nothing.\n")
