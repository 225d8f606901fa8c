"""Arms in processes of their own, and how those end. There are few, because each takes seconds to start."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from support import warm
from zoo.compared import by_hand, dies, sleeps, task

from lightning_amp import AmpPrecision
from lightning_amp.compare._pack import run_in_process

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_arm_has_the_values_of_a_run_by_hand(tmp_path: Path) -> None:
    """The process also has the settings of this one: one thread."""
    assert torch.get_num_threads() == 1
    heard: list[tuple[float | None, str]] = []
    run = run_in_process(task(tmp_path, "fp16"), lambda *progress: heard.append(progress))
    assert run.error is None
    assert {n: [p.value for p in points] for n, points in run.curves.items()} == by_hand(AmpPrecision("fp16")).notes
    assert heard[0] == (None, "starting")
    assert (tmp_path / "output.log").stat().st_size > 0


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    run = run_in_process(task(tmp_path, module=dies), lambda *_: None)
    assert run.error == "its process was killed by SIGKILL; on Linux that is often the kernel, out of memory"
    assert "a line of the user's own" in run.log


def test_an_interrupt_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    monkeypatch.setenv("SLEEPER", str(sleeper))

    def interrupt(share: float | None, text: str) -> None:
        if sleeper.exists() and sleeper.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(task(tmp_path / "work", module=sleeps), interrupt)
    assert not is_running(int(sleeper.read_text()))


SCRIPT = """
import lightning_amp
from zoo.compared import Sea, Waves, sleeps

{functions}
kwargs = dict(accelerator="cpu", max_epochs=1)
{guard}lightning_amp.compare_precisions({factories}, ["fp32"], trainer_kwargs=kwargs, dirpath="kept")
"""


def start_script(folder: Path, guard: str, factories: str, functions: str = "", *arguments: str) -> warm.Process:
    """Start a script whose errors go to `folder / "err"`."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(guard=guard, factories=factories, functions=functions))
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "SLEEPER": str(folder / "sleeper")}
    return warm.start(script, *arguments, out=folder / "out", err=folder / "err", cwd=folder, env=environment)


@pytest.mark.slow
def test_functions_of_the_script_itself(tmp_path: Path) -> None:
    """They may read the script's arguments while it is imported."""
    functions = "import sys\nWIDTH = int(sys.argv[1])\ndef make():\n    return Waves(WIDTH)\n"
    script = start_script(tmp_path, 'if __name__ == "__main__": ', "make, Sea", functions, "16")
    code, err = script.wait(), (tmp_path / "err").read_text()
    assert code == 0, err
    assert "[1/1] fp32, seed 0: " in err
    assert (tmp_path / "kept" / "fp32-seed0.json").is_file()


@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path: Path) -> None:
    script = start_script(tmp_path, "", "make, Sea", "def make():\n    return Waves(16)\n")
    assert script.wait() != 0
    err = (tmp_path / "err").read_text()
    last = err.strip().splitlines()[-1]
    assert last.startswith("ValueError: The process of an arm could not import")
    assert 'if __name__ == "__main__":' in last


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends at its next batch: `test_observer.py`")
def test_an_arm_ends_when_the_script_is_gone(tmp_path: Path) -> None:
    """It ends wherever it is: here it hangs before the first batch. The process that forked it ends as well."""
    script = start_script(tmp_path, 'if __name__ == "__main__": ', "sleeps, Sea")
    sleeper, deadline = tmp_path / "sleeper", time.monotonic() + 100
    while not (sleeper.exists() and sleeper.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    arm = int(sleeper.read_text())
    server = int(Path(f"/proc/{arm}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    script.kill()
    script.wait()
    while (is_running(arm) or is_running(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(arm)
    assert not is_running(server)
    assert not (tmp_path / "kept" / "fp32-seed0.json").exists()


@pytest.mark.slow
def test_ranks_in_a_job_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would expect one task of Slurm for each rank; the run starts its ranks itself."""
    names = ("NTASKS", "NTASKS_PER_NODE", "PROCID", "LOCALID", "NODEID", "JOB_NAME", "JOB_ID")
    for name, value in zip(names, ("1", "1", "0", "0", "0", "train", "7"), strict=True):
        monkeypatch.setenv(f"SLURM_{name}", value)
    run = run_in_process(task(tmp_path, devices=2, strategy="ddp"), lambda *_: None)
    assert run.error is None
    assert run.device.startswith("2 x cpu")
