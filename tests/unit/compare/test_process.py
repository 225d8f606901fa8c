"""Runs in processes of their own, and how those end. There are few, because each takes seconds to start."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from zoo.compared import by_hand, sleeps, spec
from zoo.processes import MOMENTS, Dies, Facts

from lightning_amp import AmpPrecision
from lightning_amp.compare import _process, run_in_process
from lightning_amp.compare._process import HERE, run_packed
from lightning_amp.compare._spec import pack

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new process")


@pytest.fixture(autouse=True)
def without_the_name_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest changes it while a test runs, and runs with another environment need another server."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


@only_linux
def test_runs_are_forks_of_one_process_with_all_that_a_new_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTS", str(tmp_path / "facts"))

    def facts() -> dict[str, Any]:
        run = run_in_process(spec(tmp_path / "work", "fp16", Facts), lambda: None)
        assert run.error is None
        curves.append({name: [point.value for point in points] for name, points in run.curves.items()})
        return json.loads((tmp_path / "facts").read_text())

    curves = list[dict[str, list[float]]]()

    with closing(HERE):
        first, again = facts(), facts()
        for moment in range(len(MOMENTS)):  # the server goes on, whenever a run dies
            killed = run_in_process(replace(spec(tmp_path / "dies", module=Dies), seed=moment), lambda: None)
            assert killed.error == "its process was killed by SIGKILL; on Linux that is often the kernel, out of memory"
            assert "a line of the user's own" in killed.log
        monkeypatch.setenv("OTHER", "1")
        other = facts()
        monkeypatch.delenv("OTHER")
        monkeypatch.setattr(_process.sys, "platform", "another")
        new = facts()
    server = first.pop("parent")
    assert (again.pop("parent"), new.pop("parent")) == (server, os.getpid())
    assert server != os.getpid()
    assert first == again == new
    assert other["environment"]["OTHER"] == "1"
    assert other["parent"] not in (server, os.getpid())
    assert (first["threads"], torch.get_num_threads()) == (1, 1)
    assert "a line for the log" in (tmp_path / "work" / "output.log").read_text()
    wait_until_gone(server, other["parent"])
    assert curves == [by_hand(AmpPrecision("fp16")).notes] * 4


@only_linux
@pytest.mark.parametrize("how", ["Ctrl-C", "cancelled", "the server dies"])
def test_a_run_that_cannot_go_on_is_killed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not wait for ever, and the next run is trained."""
    sleeper, stop = tmp_path / "sleeper", threading.Event()
    monkeypatch.setenv("SLEEPER", str(sleeper))
    monkeypatch.setattr(HERE, "stop", stop)

    def interrupt() -> None:
        if sleeper.exists() and sleeper.read_text():
            if how == "Ctrl-C":
                raise KeyboardInterrupt
            if how == "cancelled":
                stop.set()
            elif HERE.server is not None:
                os.kill(HERE.server._process.pid, signal.SIGKILL)

    with closing(HERE):
        if how == "the server dies":
            assert run_in_process(spec(tmp_path / "work", module=sleeps), interrupt).killed_by == "SIGKILL"
        else:
            with pytest.raises(KeyboardInterrupt):
                run_in_process(spec(tmp_path / "work", module=sleeps), interrupt)
        wait_until_gone(int(sleeper.read_text()))
        stop.clear()
        assert run_in_process(spec(tmp_path / "work", max_epochs=1), lambda: None).finished


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on another machine may not share the folder; the log is then in a temporary one."""
    monkeypatch.setattr(_process, "_start", lambda *_: Ended())
    header = pack(spec(tmp_path / "not" / "there"))
    assert run_packed(header).error == "its process ended with exit status 7 and left no result"
    assert not (tmp_path / "not").exists()


class Ended:
    pid = 0

    def poll(self) -> int:
        return 7


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from dataclasses import dataclass

import lightning_amp
from zoo.compared import Sea, Waves, sleeps

sys.stderr.write("the script runs\\n")


@dataclass
class Config:
    width: int


class Net(Waves):
    def __init__(self, config):
        super().__init__(config.width)
        self.save_hyperparameters()  # a checkpoint then pickles a class of the script by its name


config = Config(int(sys.argv[1]))
lightning_amp.compare_precisions(
    {factory}, Sea, ["fp32"], trainer_kwargs=dict(accelerator="cpu", max_epochs=1, logger=False), dirpath="kept"
)
"""


def start_script(folder: Path, factory: str) -> warm.Process:
    """Start a script whose errors go to `folder / "err"`."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(factory=factory))
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "SLEEPER": str(folder / "sleeper")}
    return warm.start(script, "16", out=folder / "out", err=folder / "err", cwd=folder, env=environment)


def test_a_script_needs_no_guard_and_may_pass_a_lambda(tmp_path: Path) -> None:
    script = start_script(tmp_path, "lambda: Net(config)")
    code, err = script.wait(), (tmp_path / "err").read_text()
    assert code == 0, err
    assert err.count("the script runs") == 1
    assert "[1/1] fp32, seed 0: " in err
    assert "failed" not in err
    assert list((tmp_path / "kept").rglob("*.ckpt"))


@only_linux
def test_a_run_ends_when_the_script_is_gone(tmp_path: Path) -> None:
    """It ends wherever it is: here it hangs before the first batch. The process that forked it ends as well."""
    script = start_script(tmp_path, "sleeps")
    sleeper, deadline = tmp_path / "sleeper", time.monotonic() + 100
    while not (sleeper.exists() and sleeper.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    run = int(sleeper.read_text())
    server = int(Path(f"/proc/{run}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    script.kill()
    script.wait()
    wait_until_gone(run, server)
    assert not (tmp_path / "kept" / "fp32-seed0.json").exists()


def test_ranks_in_a_job_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would expect one task of Slurm for each rank; the run starts its ranks itself."""
    names = ("NTASKS", "NTASKS_PER_NODE", "PROCID", "LOCALID", "NODEID", "JOB_NAME", "JOB_ID")
    for name, value in zip(names, ("1", "1", "0", "0", "0", "train", "7"), strict=True):
        monkeypatch.setenv(f"SLURM_{name}", value)
    run = run_in_process(spec(tmp_path, devices=2, strategy="ddp"), lambda *_: None)
    assert run.error is None
    assert run.device.startswith("2 x cpu")
