"""Run `python -m lightning_amp` as a process: exit status, one line for wrong use, no traceback, light imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.scale_runs import scale_run

from lightning_amp.cli import main

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


def run(*arguments: str, code: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m lightning_amp ARGS`, or `python -c code`."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "lightning_amp"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**more), check=False, timeout=120)


@pytest.fixture
def history(tmp_path: Path) -> str:
    scale_run("OO..L....O").to_csv(tmp_path / "run" / "scale_history.csv")
    return str(tmp_path / "run")


def test_the_script_is_this_function() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^\[project\.scripts\]\nlightning-amp = "lightning_amp\.cli:main"$', text, re.MULTILINE)
    assert callable(main)


IMPORTS = """
import sys
from lightning_amp.cli import main
status = main(sys.argv[1:])
print(*(name in sys.modules for name in ("torch", "lightning", "matplotlib")), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--help"], "False False False"),
        (["compare", "--help"], "False False False"),
        (["scale", "RUN"], "True False False"),
    ],
)
def test_only_what_is_needed_is_imported(arguments: list[str], imported: str, history: str) -> None:
    """Importing Lightning takes seconds, so `scale` must not do it."""
    done = run(*(history if argument == "RUN" else argument for argument in arguments), code=IMPORTS)
    assert (done.returncode, done.stderr) == (0, f"{imported}\n")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", [["scale", "RUN"], ["compare", "--model", "a.B", "--data", "a.C"]])
def test_without_the_extra_one_line_says_what_to_install(command: list[str], history: str) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['rich', 'jsonargparse']))  # importing them fails\n"
        "from lightning_amp.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run(*(history if argument == "RUN" else argument for argument in command), code=code)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "run `pip install 'lightning_amp[cli]'`" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals and pipes")
def test_a_reader_who_has_gone(history: str) -> None:
    """`lightning-amp scale ... | head` closes the pipe early."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "lightning_amp", "scale", history]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals and pipes")
def test_ctrl_c(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.csv")  # opening a FIFO for reading blocks
    command = [sys.executable, "-m", "lightning_amp", "scale", str(tmp_path / "never.csv")]
    # A shell starts background processes with SIGINT ignored, and their children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        deadline = time.monotonic() + 60
        writing = None
        while writing is None and time.monotonic() < deadline:
            try:
                writing = os.open(tmp_path / "never.csv", os.O_WRONLY | os.O_NONBLOCK)  # raises until somebody reads
            except OSError:
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        if writing is not None:
            os.close(writing)
    assert (process.returncode, err) == (130, "lightning-amp scale: interrupted\n")
