"""Run `python -m lightning_amp` as a process: exit status, one line for wrong use, no traceback, light imports."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import warm
from support.scale_runs import scale_run
from support.source import ROOT

from lightning_amp.cli import main
from lightning_amp.cli._user_classes import parse_user_classes

pytestmark = pytest.mark.slow

REPOSITORY = ROOT.parent


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
print(*(name in sys.modules for name in ("torch", "lightning", "jsonargparse", "matplotlib")), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "imported"), [(["--help"], "False False False False"), (["scale", "RUN"], "True False False False")]
)
def test_only_what_is_needed_is_imported(arguments: list[str], imported: str, history: str) -> None:
    """Importing Lightning takes seconds, so `scale` must not do it."""
    done = run(*(history if argument == "RUN" else argument for argument in arguments), code=IMPORTS)
    assert (done.returncode, done.stderr) == (0, f"{imported}\n")
    assert "\x1b" not in done.stdout


def test_wrong_use() -> None:
    done = run("scale", "no such file")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("lightning-amp scale: there is no file `no such file`; FILE is a file")


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
    assert "run `pip install 'jsonargparse[signatures]' rich`" in done.stderr


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


def test_a_crash_shows_its_traceback_if_it_is_wanted(history: str) -> None:
    code = (
        "import sys, lightning_amp.reports as reports\n"
        "reports.ScaleHistory.summary = lambda history: 1 / 0\n"
        "from lightning_amp.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run("scale", history, code=code, LIGHTNING_AMP_DEBUG="1")
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.startswith("Traceback")
    assert "an error of lightning-amp itself: ZeroDivisionError" in done.stderr.splitlines()[-1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse warns about how Lightning calls it
def test_what_is_found_from_here_is_made_in_a_process_that_was_started_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "nets").mkdir(parents=True)
    elsewhere.mkdir()
    (here / "nets" / "mine.py").write_text(
        "import lightning as L\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self, width: int):\n"
        "        super().__init__()\n"
        "        self.width = width\n"
        "class Data(L.LightningDataModule): ...\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    user = parse_user_classes([], ["--model=nets.mine.Net", "--model.width=64", "--data=nets.mine.Data"])
    (elsewhere / "sent").write_bytes(pickle.dumps((user.make_module, user.make_data)))
    script = elsewhere / "script.py"
    script.write_text(
        "import pickle; net, data = (f() for f in pickle.load(open('sent', 'rb'))); print(net.width, type(data))"
    )
    done = warm.run_script(script, cwd=elsewhere, env=environment())
    assert (done.returncode, done.stdout) == (0, "64 <class 'nets.mine.Data'>\n"), done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse warns about how Lightning calls it
def test_the_examples_are_found_from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    user = parse_user_classes([], ["--model", "examples.digits.DigitTransformer", "--data", "examples.digits.Digits"])
    assert repr(user.make_module) == "examples.digits.DigitTransformer()"
