"""A run that is killed loses nothing; a rank that dies ends the others at once, not at a timeout."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from support import warm

from lightning_amp._files import LEFTOVER
from lightning_amp.reports import ScaleHistory

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])}


def test_a_small_version_of_make_faults() -> None:
    done = warm.run_script(HERE / "kill.py", "--kills", "3", env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"Survived 3 kills, .* runs came to their end and were compared", done.stdout)
    assert done.stdout.endswith("Lost: nothing.\n")


def test_the_other_rank_stops_and_every_written_file_is_whole(tmp_path: Path) -> None:
    done = warm.run_script(HERE / "rank_script.py", tmp_path, env=ENVIRONMENT)
    ended = time.time()
    assert done.returncode != 0
    assert "Connection" in done.stderr or "connection" in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "survivor").read_text() == "0 14 Averaging"
    assert ended - (tmp_path / "killed").stat().st_mtime < 30  # the process group itself gives up after 120 s
    files = sorted((tmp_path / "ours").iterdir())
    assert not [p for p in files if p.name.endswith(LEFTOVER)]
    names = [f"overflow_step{step:05d}_rank0.json" for step in (3, 12)]  # no rank found a cause in its batch
    assert [p.name for p in files] == [*names, "scale_history.csv"]
    assert [json.loads((tmp_path / "ours" / name).read_text())["rank"] for name in names] == [0, 0]
    checkpoint = torch.load(tmp_path / "checkpoints" / "step=10.ckpt", weights_only=True)
    history = ScaleHistory.from_csv(tmp_path / "ours" / "scale_history.csv")
    assert [r.index for r in history if r.skipped] == [3, 12]
    assert history.num_attempted == 14
    assert len(checkpoint["callbacks"]["OverflowLocator"]["reports"]) == 1
