"""Plant each fault of `mutations.patches` in a copy of the repository, and see whether a test fails.

    make test-mutations                                           # the tests that each fault names; minutes
    make test-mutations MUTATIONS_ARGS="--only schedule"          # the faults with this word
    make test-mutations MUTATIONS_ARGS=--all                      # the whole suite for each fault; hours

First the named tests run without a fault, and must pass. The exit status is 1 if a fault was missed, or if a patch does
not apply any more: then change the patch, so that it takes the same behaviour away.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mutations.patches import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
OPTIONS = ["-x", "-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line", "--no-header"]
OF_EARLY_PLUGINS = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
SUITE = ["tests"]


def main() -> int:
    """Plant the faults, and print which were found."""
    parser = argparse.ArgumentParser(prog="make test-mutations MUTATIONS_ARGS=...", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="only the faults with this word")
    parser.add_argument("--all", action="store_true", help="run the whole suite for each fault, without slow tests")
    arguments = parser.parse_args()
    mutations = [m for m in MUTATIONS if arguments.only in m.behaviour]
    missed: list[str] = []
    for name in ("torch", "torchmetrics", "lightning.pytorch"):  # a fork has them then
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        named = list(dict.fromkeys(test for m in mutations for test in m.tests))
        code, last = run_tests(copy, SUITE if arguments.all else named)
        if code != 0:
            print(f"The tests fail without any fault: {last}")
            return 1
        for i, mutation in enumerate(mutations, 1):
            start = time.perf_counter()
            verdict = plant(copy, mutation, SUITE if arguments.all else mutation.tests)
            found = verdict.startswith("found")
            missed += [] if found else [mutation.behaviour]
            seconds = time.perf_counter() - start
            print(f"[{i:2}/{len(mutations)}] {mutation.behaviour} ({seconds:.0f} s): {verdict}", flush=True)
    print(f"{len(mutations) - len(missed)} of {len(mutations)} found.")
    return int(bool(missed))


def copy_repository(to: Path) -> None:
    """Copy the files that Git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def plant(copy: Path, mutation: Mutation, tests: Sequence[str]) -> str:
    """Return `found by ...`, or why not."""
    file = copy / "lightning_amp" / mutation.file
    text = file.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        return f"NOT PLANTED: {mutation.file} has the text {count} times"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, last = run_tests(copy, tests)
    finally:
        file.write_text(text, encoding="utf-8")
    if code == 0:
        return "MISSED"
    return f"found by {last}" if code == 1 else f"NOT RUN: pytest ended with {code}: {last}"


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return pytest's exit code and the name of the failed test, from a fork of this process."""
    output = copy / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=work, args=(copy, output, tests))
    process.start()
    process.join()
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.exitcode or 0, named[0].split(" - ")[0].split(" ", 1)[-1] if named else "\n".join(lines[-5:])


def work(copy: Path, output: Path, tests: Sequence[str]) -> None:
    """Run tests of the copy. Nothing is written as bytecode: two texts may have the same second and size."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy), str(copy / "tests")]
    found = importlib.util.find_spec("lightning_amp")
    assert found is not None and str(found.origin).startswith(str(copy)), found  # noqa: PT018
    code = pytest.main([*OPTIONS, *OF_EARLY_PLUGINS, *tests])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
