"""Two real gloo processes: who skips, why, and what it does to scale and schedule is the same on both ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("precision", "optimizer", "mode"),
    [("fp16", "fused", "automatic"), ("fp16", "plain", "manual"), ("bf16", "fused", "manual")],
)
def test_ranks_agree(precision: str, optimizer: str, mode: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "ddp_script.py"), precision, optimizer, mode, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["reasons"] == ["none", "loss", "loss", "none", "gradient", "none", "none", "none"]
    assert first["finite"]
    assert first["steps"] == 5
    assert first["lr"] == pytest.approx(0.01 * 0.9**5)
    if precision == "fp16":
        assert first["scales"] == [1024.0] * 4 + [512.0] * 4
