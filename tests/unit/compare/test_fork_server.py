"""Processes of runs that are forks of a warm process. `test_process.py` has how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from zoo.compared import Sea, Waves, by_hand, dies, task
from zoo.processes import Facts

from lightning_amp import AmpPrecision
from lightning_amp.compare import _fork_server, _process
from lightning_amp.compare._fork_server import FORK_SERVER, Fork, ForkServer
from lightning_amp.compare._pack import pack
from lightning_amp.compare._place import Place, assigned
from lightning_amp.compare._process import PackedTask, run_packed

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new process")


# -- which runs are forks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "one_process"),
    [
        ({}, True),
        ({"devices": 1}, True),
        ({"devices": "auto", "strategy": "auto"}, True),
        ({"devices": 2}, False),
        ({"devices": [0, 1]}, False),
        ({"strategy": "ddp"}, False),
        ({"devices": 1, "num_nodes": 2}, False),
    ],
)
def test_runs_in_several_processes_are_no_forks(kwargs: Any, one_process: bool, tmp_path: Path) -> None:
    assert pack(task(tmp_path, **kwargs)).one_process == one_process


# -- the server of this process ----------------------------------------------------------------------------------------


class Server:
    """Stands in for the process that forks."""

    made: ClassVar[list[Server]] = []

    def __init__(self, environment: Any, path: Any) -> None:
        self.settings = dict(environment), list(path)
        self.is_busy = self.closed = False
        self.made.append(self)

    def fits(self, environment: Any, path: Any) -> bool:
        return self.settings == (dict(environment), list(path))

    def fork(self, folder: Path, on_wait: Any) -> Any:
        return (self, folder)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    monkeypatch.setattr(_fork_server, "_Server", Server)
    monkeypatch.setattr(Server, "made", [])
    monkeypatch.setattr(_fork_server, "sys", SimpleNamespace(platform="linux"))
    return Server.made


def test_one_server_for_several_runs(made: list[Server], tmp_path: Path) -> None:
    server = ForkServer()
    assert server.fork(tmp_path, {}, []) is None  # nobody needs it
    with server.warm():
        with server.warm():
            assert server.fork(tmp_path, {"A": "1"}, ["x"]) == (made[0], tmp_path)
        assert server.fork(tmp_path, {"A": "1"}, ["x"]) == (made[0], tmp_path)
        assert not made[0].closed
    assert made[0].closed
    assert server.fork(tmp_path, {"A": "1"}, ["x"]) is None
    assert len(made) == 1


@pytest.mark.parametrize("settings", [({"A": "2"}, ["x"]), ({"A": "1", "B": ""}, ["x"]), ({"A": "1"}, ["x", "y"])])
def test_another_environment_has_a_server_of_its_own(settings: Any, made: list[Server], tmp_path: Path) -> None:
    """Libraries read the environment when they are imported. While the first one is busy, a new process is started."""
    server = ForkServer()
    with server.warm():
        server.fork(tmp_path, {"A": "1"}, ["x"])
        made[0].is_busy = True
        assert server.fork(tmp_path, *settings) is None
        assert server.fork(tmp_path, {"A": "1"}, ["x"]) == (made[0], tmp_path)
        made[0].is_busy = False
        assert server.fork(tmp_path, *settings) == (made[1], tmp_path)
        assert (made[0].closed, made[1].closed) == (True, False)


def test_other_systems_have_none(made: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_fork_server, "sys", SimpleNamespace(platform="darwin"))
    server = ForkServer()
    with server.warm():
        assert server.fork(tmp_path, {}, []) is None
    assert made == []


def test_a_fork_whose_server_is_gone(tmp_path: Path) -> None:
    """The kernel kills the forks as well. A status that the server wrote before counts."""
    server = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fork = Fork(server, tmp_path)
    assert (fork.pid, fork.poll()) == (None, None)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.02)
    (tmp_path / "pid").write_text("17")
    assert fork.pid == 17
    assert server.stdin is not None
    server.stdin.close()
    server.kill()
    server.wait()
    assert fork.wait() == -9
    (tmp_path / "exit").write_text("3")
    assert Fork(server, tmp_path).wait(1.0) == 3


def test_a_fork_keeps_its_status(tmp_path: Path) -> None:
    """The folder of a run is removed when it has ended, and the server is not busy for ever."""
    server = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fork = Fork(server, tmp_path)
    (tmp_path / "exit").write_text("3")
    assert fork.wait(1.0) == 3
    (tmp_path / "exit").unlink()
    assert fork.poll() == 3
    server.communicate()


@only_linux
def test_an_interrupt_while_the_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It imports torch and Lightning for seconds. A second run then starts another server."""
    script = tmp_path / "slow.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(_fork_server, "CHILD", str(script))

    def interrupts() -> None:
        raise KeyboardInterrupt

    server = ForkServer()
    with server.warm():
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                server.fork(tmp_path, dict(os.environ), [], interrupts)
            assert time.monotonic() - began < 10
            assert server._server is not None
            assert server._server._process.poll() == -9


@only_linux
@pytest.mark.slow
def test_a_run_that_is_given_up_before_its_fork(tmp_path: Path) -> None:
    """Its folder is gone when the server forks. The server goes on."""
    with FORK_SERVER.warm():
        assert run_packed(pack(task(tmp_path, module=dies)), str(tmp_path), lambda *_: None).killed_by == "SIGKILL"
        server = FORK_SERVER._server
        assert server is not None
        assert server._process.stdin is not None
        server._process.stdin.write(b"/nowhere/at all\n")
        server._process.stdin.flush()
        assert run_packed(pack(task(tmp_path, module=dies)), str(tmp_path), lambda *_: None).killed_by == "SIGKILL"
        assert FORK_SERVER._server is server
        assert server._process.poll() is None


@only_linux
def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run starts in a new process, as it does without a server."""
    started: list[Any] = []

    class Process:
        pid = 0

        def wait(self, timeout: float | None = None) -> int:
            return 5

        def poll(self) -> int:
            return 5

    def new_process(header: Path, *_: Any) -> Process:
        started.append(json.loads(header.read_text()))
        return Process()

    monkeypatch.setattr(_process, "_new_process", new_process)
    monkeypatch.setattr(_fork_server, "sys", SimpleNamespace(platform="linux", executable="false"))
    with FORK_SERVER.warm():
        run = run_packed(pack(task(tmp_path)), str(tmp_path), lambda *_: None)
    assert len(started) == 1
    assert run.error == "its process ended with exit status 5 and left no result"


# -- forks -------------------------------------------------------------------------------------------------------------


@contextmanager
def on(place: Place) -> Any:
    token = assigned.set(place)
    try:
        yield
    finally:
        assigned.reset(token)


@pytest.fixture
def facts_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[PackedTask], tuple[dict[str, Any], dict[str, Any]]]:
    """Run a task, and return its facts and its curves."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("FACTS", str(tmp_path / "facts.json"))

    def run(packed: PackedTask) -> tuple[dict[str, Any], dict[str, Any]]:
        run = run_packed(packed, str(tmp_path / "work"), lambda *_: None)
        assert run.error is None, run.log
        assert "a line for the log\n" in (tmp_path / "work" / "output.log").read_text()
        facts = json.loads((tmp_path / "facts.json").read_text())
        return facts, {name: [point.value for point in points] for name, points in run.curves.items()}

    return run


@only_linux
@pytest.mark.slow
def test_a_fork_is_like_a_new_process(facts_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the same environment, folder, path, output and threads, and the values of a run by hand, twice."""
    (tmp_path / "elsewhere").mkdir()
    packed = pack(task(tmp_path, "fp16", module=Facts, max_epochs=1))
    settings = {**packed.origin["settings"], "num_threads": 2}
    packed = replace(packed, origin={**packed.origin, "settings": settings})
    core = min(os.sched_getaffinity(0))
    with FORK_SERVER.warm():
        first, values = facts_of(packed)
        again, values_again = facts_of(packed)
        monkeypatch.chdir(tmp_path / "elsewhere")
        with on(Place({"CUDA_VISIBLE_DEVICES": "7"}, cores=(core,))):
            placed, _ = facts_of(packed)
        killed = run_packed(pack(task(tmp_path, module=dies)), str(tmp_path / "dies"), lambda *_: None)
        monkeypatch.setenv("OTHER", "1")
        other, _ = facts_of(packed)
    server = first.pop("parent")
    assert server != os.getpid()
    assert again.pop("parent") == placed["parent"] == server
    assert first == again
    assert (killed.killed_by, killed.error is not None) == ("SIGKILL", True)
    assert "a line of the user's own" in killed.log
    assert (placed["folder"], placed["environment"]["CUDA_VISIBLE_DEVICES"]) == (str(tmp_path / "elsewhere"), "7")
    assert (placed["cores"], placed["threads"]) == ([core], 1)
    assert (other["environment"]["OTHER"], "OTHER" in first["environment"]) == ("1", False)
    assert other["parent"] not in (server, os.getpid())
    assert first["threads"] == 2
    monkeypatch.delenv("OTHER")
    monkeypatch.chdir(first["folder"])
    new, values_of_new = facts_of(replace(packed, one_process=False))
    assert new.pop("parent") == os.getpid()
    assert first == new
    assert values == values_again == values_of_new
    assert values == by_hand(AmpPrecision("fp16"), Waves, Sea, max_epochs=1).notes
    assert torch.get_num_threads() == 1
    deadline = time.monotonic() + 20
    while Path(f"/proc/{server}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{server}").exists()
