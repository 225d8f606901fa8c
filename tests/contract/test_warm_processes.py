"""A process of `support.warm` behaves like a new one, except that its imports are already done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import warm

SCRIPT = """
import atexit, json, os, random, sys
import numpy, torch
atexit.register(print, "the end")
ours = [name for name in sys.modules if name.startswith(("lightning_amp", "support"))]
facts = {"name": __name__, "file": __file__, "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[:2],
         "ours": ours, "environment": dict(os.environ), "threads": torch.get_num_threads(),
         "main": sys.modules["__main__"].__dict__ is globals(), "input": sys.stdin.read()}
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), os.getpid()]
print(json.dumps([facts, drawn, list({f"{i}" for i in range(50)})]), flush=True)
if sys.argv[1] == "raises":
    raise KeyError("so")
sys.exit(3)
"""

END = """
import atexit, sys, threading, time

class Last:
    def __del__(self):
        print("let go of")

kept = [Last()]
kept.append(kept)
atexit.register(print, "the end")

def late():
    time.sleep(0.2)
    print("a thread")

threading.Thread(target=late).start()
if sys.argv[1] in ("KeyError", "KeyboardInterrupt"):
    raise {"KeyError": KeyError, "KeyboardInterrupt": KeyboardInterrupt}[sys.argv[1]]
if sys.argv[1] != "ends":
    sys.exit({"exits with 3": 3, "says why": "because", "returns": None}[sys.argv[1]])
"""


def run(script: Path, how: str, environment: dict[str, str], argument: str = "exits") -> tuple[Any, str, int]:
    """Return a process's output, errors and exit code."""
    if how == "warm":
        done = warm.run_script(script, argument, "2", env=environment, cwd=script.parent)
    else:
        done = subprocess.run(
            [sys.executable, script, argument, "2"], env=environment, cwd=script.parent, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    first, last = done.stdout.splitlines()
    assert last == "the end"
    return json.loads(first), done.stderr, done.returncode


pytestmark = pytest.mark.slow


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    names = ("PATH", "HOME", "OMP_WAIT_POLICY", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "modules"), "MINE": "1"}


def test_a_script_sees_what_it_would_see(script: Path, environment: dict[str, str]) -> None:
    (here, drawn, _), _, code = run(script, "warm", environment)
    (there, _, _), _, expected = run(script, "new", environment)
    for facts in (here, there):  # settings that importing torch and Lightning changes
        facts["environment"] = {name: facts["environment"].get(name) for name in environment}
    assert here == there
    assert code == expected == 3
    (_, again, _), _, _ = run(script, "warm", environment)
    assert not set(drawn) & set(again)


@pytest.mark.parametrize("how", ["ends", "returns", "exits with 3", "says why", "KeyError", "KeyboardInterrupt"])
def test_it_ends_as_a_new_one(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(END)
    ended = warm.run_script(script, how)
    expected = subprocess.run([sys.executable, script, how], capture_output=True, text=True, check=False, timeout=120)
    assert ended.stdout.splitlines() == expected.stdout.splitlines() == ["a thread", "the end", "let go of"]
    assert ended.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert ended.returncode == expected.returncode
